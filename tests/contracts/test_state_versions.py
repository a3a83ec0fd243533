"""State versions on real files: newer code takes over session by session, older code is refused,
nothing is misread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltalake import DeltaTable
from msgspec.structs import replace

from seriatim.engine.machine import UserMachine
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session
from seriatim.errors import ConfigError
from seriatim.operations.prove.verify import Verification
from seriatim.operations.status import session_states
from seriatim.storage.audit import FileAudit
from seriatim.storage.state_files import StateFiles
from seriatim.storage.store import LocalStore
from seriatim.stream import TableSettings
from tests.contracts.disk_streams import DiskStream
from tests.test_testing import Add, NewState, OldState, upgrade, versioned

P = Partition("in-a", 0)
SESSIONS = [f"s{number:02}" for number in range(20)]
HOUR_MS = 3_600_000


class Versions(DiskStream):
    """A stream on disk whose machine may be deployed anew."""

    def __init__(self, root: Path, **fields: Any) -> None:
        super().__init__(
            root, machine="m:Versioned", table=TableSettings(), sequence=None, **fields
        )
        self.kafka.create("in-a", 1)
        self.deploy(1, OldState)

    def deploy(self, version: int, state: Any, **more: Any) -> None:
        """From now on this code folds."""
        kind = versioned(version, state, **more)
        self.runner: Any = UserMachine("m:Versioned", kind)
        self.machine = lambda: UserMachine("m:Versioned", kind)
        self._open()

    def add(self, session: str, n: int, *, start: bool = False, at_ms: int = 0) -> None:
        """One message."""
        self.kafka.produce(
            "in-a", session, msgspec.json.encode(Add(n, start=start)), timestamp=at_ms
        )

    def saved(self) -> dict[str, Session]:
        """The sessions as they are stored, each by the newest file that has it."""
        return dict(StateFiles(LocalStore(self.root), "s").all_sessions(self.accounts()[P].state))

    def versions(self) -> dict[str, int]:
        """Each session's version."""
        return {name: session.state_version for name, session in self.saved().items()}


def state_of(session: Session) -> NewState:
    """The state that is stored of a session."""
    assert session.state_bytes is not None
    return msgspec.msgpack.decode(session.state_bytes, type=NewState)


def begun(root: Path, **fields: Any) -> Versions:
    """Twenty sessions, folded by version 1."""
    one = Versions(root, **fields)
    for number, session in enumerate(SESSIONS):
        one.add(session, number, start=True)
    one.run()
    return one


def test_only_touched_sessions_are_rewritten(tmp_path: Path) -> None:
    """Version 2 takes over at a session's next message; the files of before stay as they are, byte
    for byte.
    """
    one = begun(tmp_path)
    (old,) = one.accounts()[P].state
    content = (tmp_path / old.path).read_bytes()
    one.deploy(2, NewState, upgrade=upgrade)
    for session in ("s03", "s07"):
        one.add(session, 1)
    outcome = one.run()
    first, second = one.accounts()[P].state
    assert (first, (tmp_path / old.path).read_bytes(), outcome.findings) == (old, content, [])
    sessions = dict(StateFiles(LocalStore(tmp_path), "s").all_sessions([second]))
    assert {name: one.state_version for name, one in sessions.items()} == {"s03": 2, "s07": 2}
    assert state_of(sessions["s07"]) == NewState(15, doubled=True)
    assert one.versions() == dict.fromkeys(SESSIONS, 1) | {"s03": 2, "s07": 2}
    records = (
        DeltaTable(tmp_path / "records")
        .to_pyarrow_dataset()
        .to_table(use_threads=False)
        .to_pylist()
    )
    assert {row["offset"]: row["total"] for row in records if row["offset"] >= 20} == {
        20: 7,
        21: 15,
    }


def test_merging_files_changes_no_version(tmp_path: Path) -> None:
    """Sessions that a merge takes along stay as version 1 wrote them; they are upgraded when it is
    their turn.
    """
    one = begun(tmp_path)
    one.deploy(2, NewState, upgrade=upgrade)
    for session in SESSIONS[:13]:
        one.add(session, 1)
    one.run()
    for session in SESSIONS[:19]:
        one.add(session, 1)
    one.run()
    (merged,) = one.accounts()[P].state
    assert merged.rows == 20
    assert one.versions() == dict.fromkeys(SESSIONS, 2) | {"s13": 1, "s19": 1}
    assert [finding.session for finding in one.run().findings] == []
    assert one.accounts()[P].quarantined == 1


def test_older_code_is_refused_once_newer_code_has_written(tmp_path: Path) -> None:
    """Not before: a deployment that folded nothing can be taken back."""
    one = begun(tmp_path)
    one.deploy(2, NewState, upgrade=upgrade)
    one.run()
    one.deploy(1, OldState)
    one.add("s01", 1)
    one.run()
    one.deploy(2, NewState, upgrade=upgrade)
    one.add("s01", 1)
    one.run()
    one.deploy(1, OldState)
    one.add("s01", 1)
    frontier = one.accounts()[P].frontier
    with pytest.raises(
        ConfigError, match="the state has version 2, this code knows only 1"
    ) as refused:
        one.run()
    assert "deploy the code that wrote version 2" in refused.value.next
    assert one.accounts()[P].frontier == frontier


def test_a_version_may_be_left_out(tmp_path: Path) -> None:
    """`upgrade` is told which version it gets: 1 and 2 side by side become 3."""
    one = begun(tmp_path)
    one.deploy(2, NewState, upgrade=upgrade)
    one.add("s01", 1)
    one.run()

    def to_third(_self: Any, old: bytes, version: int) -> NewState:
        read = msgspec.msgpack.decode(old, type=OldState if version == 1 else NewState)
        return NewState(100 * version + read.n, doubled=False)

    one.deploy(3, NewState, upgrade=to_third)
    for session in ("s01", "s02"):
        one.add(session, 1)
    one.run()
    saved = one.saved()
    third = {name: state_of(saved[name]).n for name in ("s01", "s02")}
    assert third == {"s01": 204, "s02": 103}
    assert one.versions() == dict.fromkeys(SESSIONS, 1) | {"s01": 3, "s02": 3}


def test_verify_and_status_read_every_version(tmp_path: Path) -> None:
    """And an upgrade that raises is told as the machine's own trouble."""
    one = begun(tmp_path)
    one.deploy(2, NewState, upgrade=upgrade)
    one.add("s02", 1)
    one.run()
    done = Verification("s", FileAudit(LocalStore(tmp_path))).run()
    assert (done.difference, done.sessions) == (None, 20)
    head = one.ledger.head("s")

    def shown(name: str) -> dict[str, Any]:
        (saved,) = session_states(one.runner, head.ledger, one.files, name)
        return saved.values

    assert (shown("s02")["state"], shown("s02")["state_version"]) == ({"n": 5, "doubled": True}, 2)
    assert (shown("s04")["state"], shown("s04")["state_version"]) == ({"n": 8, "doubled": True}, 1)
    with pytest.raises(
        ConfigError, match=r"cannot read session 's13'.*ValueError: unlucky"
    ) as refused:
        shown("s13")
    assert "`upgrade`" in refused.value.next


def test_a_session_that_could_not_end_has_the_version_of_its_bytes(tmp_path: Path) -> None:
    """It was upgraded before its end raised: what is saved is version 2, and is said to be."""
    one = begun(tmp_path)
    one.stream = replace(one.stream, session_timeout_hours=1)

    def end(_self: Any, _state: NewState) -> list[Any]:
        raise ValueError("no end")

    one.deploy(2, NewState, upgrade=upgrade, end=end)
    one.add("s05", 1, at_ms=5 * HOUR_MS)
    assert [(finding.finding, finding.cause) for finding in one.run().findings] == [
        ("raised", "ValueError: no end")
    ]
    session = one.saved()["s05"]
    assert (session.state_version, state_of(session)) == (2, NewState(10, doubled=True))
