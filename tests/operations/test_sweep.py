"""Sweeping the dead: orphans of crashes and fenced runs go, whatever an entry named and whoever
lives stay.
"""

from __future__ import annotations

import pytest

from seriatim.engine.crash_points import CRASH_POINTS
from seriatim.engine.offsets import Partition
from seriatim.ledger.manifests import MANIFEST_FOLDER
from seriatim.ledger.model import Account
from seriatim.ledger.replaced_files import Intent
from seriatim.memory.files import MemoryFile
from seriatim.operations.sweep import sweep_dead
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0, create_filled_stream, send
from tests.operations.test_crash_points import lively, logical, run_killed

ROOMS = ("records", "state", "kept")


def swept(made: MemoryStream) -> list[str]:
    """Sweep up to the head of now."""
    head = made.ledger.head("s")
    assert head is not None
    return sweep_dead(made.ledger, made.files, head)


def account(made: MemoryStream) -> Account:
    """The first partition's."""
    return made.accounts()[A0]


def named(made: MemoryStream) -> set[str]:
    """Every file and manifest that an entry ever named."""
    entries = [commit.entry for commit in made.ledger.commits if commit.entry is not None]
    changes = [change for entry in entries for change in entry.changes]
    files = {
        file.path
        for change in changes
        for file in (*change.records, *change.quarantine_files, *(change.state or ()))
    }
    return files | {commit.manifest.path for commit in made.ledger.commits}


def there(made: MemoryStream) -> set[str]:
    """Every file and manifest."""
    manifests = {key for key, _ in made.ledger.store.keys(MANIFEST_FOLDER)}
    return {*made.files.files, *manifests}


def leave(made: MemoryStream, stem: str, *rooms: str) -> set[str]:
    """Files of a run that was too late to be swept after the commit."""
    paths = {f"{room}/{A0}/{stem}" for room in rooms}
    made.files.files |= {path: MemoryFile() for path in paths}
    return paths


def sliced() -> MemoryStream:
    """A partition folded in several slices: its state was merged, messages are in quarantine."""
    made = create_filled_stream()
    send(made, A0, b"?", 8, ["a", "c"], 9, 10, 11)
    made.run(messages_max=2)
    return made


@pytest.mark.long
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_after_a_crash_and_a_re_run_nothing_is_left_that_no_entry_named(point: str) -> None:
    """Files, half files and manifests, of whichever attempt; and the output is as it was."""
    made = lively()
    run_killed(made, point, 1)
    made.run(messages_max=6)
    before = logical(made)
    swept(made)
    assert there(made) == named(made)
    assert logical(made) == before
    assert swept(made) == []


def test_late_files_at_older_starts_are_swept() -> None:
    """A fenced run wrote them after the winner had swept; named ones beside them stay, old state
    too.
    """
    made = sliced()
    late = {path for start in (0, 2, 4) for path in leave(made, f"0-{start}-late", *ROOMS)}
    assert set(swept(made)) == late
    assert there(made) == named(made)


def test_a_file_at_the_frontier_is_alive() -> None:
    """A run that goes on now writes there; nothing before its commit tells it from a dead one."""
    made = sliced()
    live = leave(made, f"0-{account(made).frontier}-b", *ROOMS) | leave(made, "1-0-b", *ROOMS)
    assert swept(made) == []
    assert live <= there(made)


def test_records_rewritten_by_others_take_nothing_along() -> None:
    """A foreign OPTIMIZE leaves none of our record files active: the state of their slices is named
    all the same.
    """
    made = sliced()
    made.ledger.active_paths = lambda _: set()  # type: ignore[method-assign]
    assert swept(made) == []


def test_what_a_lost_manifest_named_cannot_be_known_so_it_stays() -> None:
    """Sweeping neither guesses nor fails."""
    made = sliced()
    late = leave(made, "0-2-late", *ROOMS)
    lost = [commit.manifest.path for commit in made.ledger.commits[:-1]]
    for path in lost:
        made.ledger.store.objects.pop(path)
    assert swept(made) == []
    assert late <= there(made)


def test_a_compaction_that_begins_while_files_are_listed_is_alive() -> None:
    """Its intent is there before its first file: whoever sees the file, and looks for the intent
    then, finds it.
    """
    made = sliced()
    output, records = (
        f"records/{A0}/compact-now-0",
        tuple(file.path for file in made.ledger.files_now()),
    )
    listed = made.files.paths

    def begins(partition: Partition) -> list[str]:
        made.files.put_intent(Intent(partition=A0, attempt="now", epoch=0, records=records))
        made.files.files[output] = MemoryFile()
        return listed(partition)

    made.files.paths = begins  # type: ignore[method-assign]
    assert swept(made) == []
    assert output in there(made)


def test_a_compaction_is_dead_once_its_partition_was_repaired() -> None:
    """Of another epoch, or with an input that left the table; without an intent it never was one."""
    made = sliced()
    records = tuple(file.path for file in made.ledger.files_now())
    intents = {
        "epoch": Intent(partition=A0, attempt="epoch", epoch=3, records=records),
        "gone": Intent(
            partition=A0, attempt="gone", epoch=0, records=(*records, f"records/{A0}/0-0-gone")
        ),
        "alive": Intent(partition=A0, attempt="alive", epoch=0, records=records),
    }
    for intent in intents.values():
        made.files.put_intent(intent)
    outputs = {
        name: leave(made, f"compact-{name}-0", "records", "state") for name in (*intents, "nobody")
    }
    assert set(swept(made)) == outputs["epoch"] | outputs["gone"] | outputs["nobody"]
    assert outputs["alive"] <= there(made)
    assert {intent.attempt for intent in made.files.intents(A0)} == {"alive"}
