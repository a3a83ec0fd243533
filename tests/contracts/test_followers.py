"""Every follower keeps the promises of the loop, in memory and on disk: it shows exactly the entry that
it names, is brought up once whoever else does it at the same time, and starts over under another ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.errors import PlatformError
from seriatim.ledger.commit import TRIES_MAX
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Ledger
from seriatim.operations.followers import (
    Follower,
    FurtherTableFollower,
    GapsFollower,
    QuarantineFollower,
    catch_up,
)
from seriatim.operations.publish import CurrentFollower
from seriatim.ports import CommitConflictError
from seriatim.storage.current_table import DeltaCurrent
from seriatim.storage.record_files import record_schema
from seriatim.storage.store import LocalStore
from seriatim.testing import MemoryStream
from tests.contracts.test_further_tables import DiskMarket
from tests.operations.market_machine import create_market_stream, machine, send_busy_market
from tests.operations.memory_streams import A0
from tests.operations.publish_helper import current_of
from tests.operations.test_further_tables import head

NAMES = ("gaps", "quarantine", "trade", "current")


class Followed:
    """A stream with several entries, and its followers."""

    def __init__(self, made: MemoryStream, open_current: Callable[[], Any]) -> None:
        self.made = made
        self.open_current = open_current
        for _ in range(2):
            send_busy_market(made, A0)
            made.run(messages_max=5)
        self.head = head(made)
        self.middle = made.ledger.ledger_at("s", self.head.sequence // 2)

    def group(self, name: str) -> list[Follower[Any]]:
        """The followers that are brought up together with the named one, which is the last."""
        derived: Any = self.made.derived
        gaps = GapsFollower(derived)
        if name == "gaps":
            return [gaps]
        if name == "quarantine":
            return [gaps, QuarantineFollower(derived, gaps)]
        if name == "current":
            current = self.open_current()
            return [CurrentFollower(self.made.ledger, current, dry_run=False, progress=None)]
        return [FurtherTableFollower(derived.output_store, name)]

    def catch_up(self, name: str, target: Ledger, *, rebuild: bool = False) -> bool:
        """Bring the named follower to an entry."""
        return catch_up(self.made.ledger, self.group(name), target, rebuild=rebuild)

    def shown(self, name: str) -> tuple[int, str]:
        """The entry that a follower names."""
        version = self.group(name)[-1].applied_version()
        return version.sequence, version.sha256


@pytest.fixture(params=["memory", "disk"])
def followed(request: pytest.FixtureRequest, tmp_path: Path) -> Followed:
    """Both kinds of tables."""
    if request.param == "memory":
        made = create_market_stream(2)
        current = current_of(made)
        return Followed(made, lambda: current)
    runner = machine()
    spec = runner.row_key_spec
    assert spec is not None
    schema = record_schema(runner.columns)
    store = LocalStore(tmp_path)
    return Followed(DiskMarket(tmp_path), lambda: DeltaCurrent(store, "s", schema, spec))


def named(ledger: Ledger) -> tuple[int, str]:
    """How an entry is named."""
    return ledger.sequence, ledger.sha256


@pytest.mark.parametrize("name", NAMES)
def test_a_rebuild_goes_to_exactly_the_target(followed: Followed, name: str) -> None:
    """Also to an entry before the newest, and from there on step by step, once."""
    assert followed.catch_up(name, followed.middle, rebuild=True)
    assert followed.shown(name) == named(followed.middle)
    if name != "gaps":  # gaps and quarantine without a change get no commit, and then no new mark
        followed.catch_up(name, followed.head)
    if name in ("trade", "current"):
        assert followed.shown(name) == named(followed.head)
        assert not followed.catch_up(name, followed.head)
        assert not followed.catch_up(name, followed.middle), "a table never goes back by itself"


def test_no_entry_after_the_target_is_added(followed: Followed) -> None:
    """A table that names an entry has what the entries up to it made, and nothing of later ones."""
    group = [*followed.group("quarantine"), *followed.group("trade")]
    added: list[int] = []
    real_add_entry = group[-1].add_entry

    def add_entry(manifest: Manifest) -> None:
        added.append(manifest.entry.sequence)
        real_add_entry(manifest)

    group[-1].add_entry = add_entry  # type: ignore[method-assign]
    catch_up(followed.made.ledger, group, followed.middle, rebuild=True)
    assert added == list(range(followed.middle.sequence + 1))


@pytest.mark.parametrize("name", NAMES)
def test_a_table_of_another_ledger_starts_over(followed: Followed, name: str) -> None:
    """It names an entry that this ledger never had, however high its number is."""
    stranger = replace(followed.head, sequence=followed.head.sequence, sha256="f" * 64)
    followed.catch_up(name, followed.middle, rebuild=True)
    group = followed.group(name)
    for follower in group:
        follower.begin(replace(follower.applied_version(), sequence=-1), stranger)
        follower.put()
    assert followed.shown(name) == named(stranger)
    assert followed.catch_up(name, followed.head)
    assert followed.shown(name) == named(followed.head)


@pytest.mark.parametrize("name", NAMES)
def test_two_at_the_same_time_put_nothing_twice(followed: Followed, name: str) -> None:
    """The one that comes second meets a conflict, reads again, and finds that all is done."""
    group = followed.group(name)
    late = group[-1]
    real_put = late.put
    conflicts = []

    def put_after_a_rival() -> None:
        if not conflicts:
            followed.catch_up(name, followed.head, rebuild=True)
        try:
            real_put()
        except CommitConflictError as error:
            conflicts.append(error)
            raise

    late.put = put_after_a_rival  # type: ignore[method-assign]
    assert catch_up(followed.made.ledger, group, followed.head, rebuild=True)
    assert len(conflicts) == 1
    assert followed.shown(name) == named(followed.head)


@pytest.mark.parametrize("name", NAMES)
def test_tries_are_bounded(followed: Followed, name: str) -> None:
    """The message names the table and the way on."""
    group = followed.group(name)
    tries = []

    def refuse() -> None:
        tries.append(1)
        raise CommitConflictError("no room on the disk")

    group[-1].put = refuse  # type: ignore[method-assign]
    with pytest.raises(PlatformError, match="could not be written") as caught:
        catch_up(followed.made.ledger, group, followed.head, rebuild=True)
    assert len(tries) == TRIES_MAX
    assert group[-1].description in caught.value.message
    assert "no room on the disk" in caught.value.render()
    assert caught.value.next == group[-1].advice


def test_entries_are_read_once_for_a_group_and_not_without_need(followed: Followed) -> None:
    """Gaps, quarantine and two further tables share one walk; `current` needs none after slices."""
    ledger = followed.made.ledger
    walks: list[int] = []
    real_entries = ledger.entries

    def counted(stream: str, after: int) -> Any:
        walks.append(after)
        return real_entries(stream, after)

    ledger.entries = counted  # type: ignore[method-assign]
    group = [*followed.group("quarantine"), *followed.group("trade"), *followed.group("note")]
    catch_up(ledger, group, followed.head, rebuild=True)
    assert walks == [-1]
    followed.catch_up("current", followed.middle, rebuild=True)
    walks.clear()
    assert followed.catch_up("current", followed.head)
    assert walks == []
