"""Which machine may read the state of a ledger. The wrong one is refused before anything is read.

Next: ledger/model.py has the machine, its shape and its highest state version.
"""

from __future__ import annotations

from seriatim.errors import ConfigError
from seriatim.ledger.model import Ledger


def refuse_incompatible_machine(
    ledger: Ledger,
    machine: str,
    state_version: int,
    can_upgrade: bool,
    shape: str,
) -> None:
    """Refuse code that would misread the state: code that is older than the state, another machine,
    or a newer machine without `upgrade`.
    """
    stream = ledger.stream
    if ledger.machine and ledger.machine != machine:
        raise ConfigError(
            f"{stream}: the state was written by machine {ledger.machine!r}, "
            f"the stream file says {machine!r}",
            next=f"set machine = {ledger.machine!r}, "
            "or give the new machine its own stream file and output path",
        )
    if ledger.shape and ledger.shape != shape:
        raise ConfigError(
            f"{stream}: the stream file has changed in a way that would misread the state",
            expected=ledger.shape,
            found=shape,
            next="set it back, or give the stream a new output path",
        )
    if state_version < ledger.state_version:
        raise ConfigError(
            f"{stream}: the state has version {ledger.state_version}, "
            f"this code knows only {state_version}",
            next=f"deploy the code that wrote version {ledger.state_version}, or newer",
        )
    if ledger.state_version and state_version > ledger.state_version and not can_upgrade:
        raise ConfigError(
            f"{stream}: the state has version {ledger.state_version}, "
            f"this code {state_version} and no `upgrade`",
            next=f"write {machine}'s upgrade(old, version), "
            f"or set state_version back to {ledger.state_version}",
        )


def refuse_changed_machine(ledger: Ledger, state_version: int) -> None:
    """Refuse another version of the machine where the unchanged one is required."""
    if state_version != ledger.state_version:
        raise ConfigError(
            f"{ledger.stream}: the state has version {ledger.state_version}, "
            f"the deployed machine {state_version}",
            next="leave out --machine unchanged: "
            "then history is folded again with what is deployed",
        )
