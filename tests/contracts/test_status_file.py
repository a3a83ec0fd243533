"""The ledger as its manifests tell it is the ledger as Delta tells it, entry by entry."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from seriatim.errors import ConfigError, IntegrityError, SeriatimError
from seriatim.ledger.commit import read_head
from seriatim.operations.status import (
    HaltStatus,
    PartitionStatus,
    QuarantinedSession,
    StreamStatus,
)
from seriatim.storage.status_file import StatusFiles
from seriatim.storage.store import LocalStore
from tests.contracts.disk_streams import DiskStream, create_filled_output


def test_manifests_say_what_the_ledger_says(tmp_path: Path) -> None:
    """The last entry, each of the past, and all of them backward."""
    made, files = create_filled_output(tmp_path / "s"), StatusFiles(LocalStore(tmp_path / "s"))
    ledger = made.ledger.head("s").ledger
    assert files.last_ledger() == ledger
    entries = list(made.ledger.entries("s", -1))
    assert [files.manifest(number) for number in range(len(entries))] == entries
    assert list(files.manifests_backward(1000)) == entries[::-1]
    assert list(files.manifests_backward(2)) == [entries[-1], entries[-2]]


def test_a_try_that_never_came_to_be_is_not_taken_for_an_entry(tmp_path: Path) -> None:
    """Of several manifests with one number, it is the one that the next entry names."""
    made, files = create_filled_output(tmp_path / "s"), StatusFiles(LocalStore(tmp_path / "s"))
    entries = list(made.ledger.entries("s", -1))
    for number in (2, 3):
        entry = replace(entries[number].entry, attempt="never came to be")
        made.ledger.put_manifest(replace(entries[number], entry=entry))
    assert files.manifest(2) == entries[2]


def test_a_stream_that_was_never_run_has_nothing(tmp_path: Path) -> None:
    """No ledger, no entry, no status; and no error."""
    files = StatusFiles(LocalStore(tmp_path))
    assert (files.last_ledger(), files.read_status(), list(files.manifests_backward(5))) == (
        None,
        None,
        [],
    )
    with pytest.raises(ConfigError, match="there is no entry 0"):
        files.manifest(0)


def test_what_is_damaged_is_refused(tmp_path: Path) -> None:
    """A manifest whose hash differs or that is gone, a witness that is no JSON."""
    made, files = create_filled_output(tmp_path / "s"), StatusFiles(LocalStore(tmp_path / "s"))
    (path,) = (made.root / "manifests").glob("0000000002-*")
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    with pytest.raises(IntegrityError, match="entry 2 cannot be read: its hash differs"):
        files.manifest(2)
    path.unlink()
    with pytest.raises(IntegrityError, match="entry 2 cannot be read: it is missing"):
        list(files.manifests_backward(1000))
    (made.root / "head.json").write_text("{")
    with pytest.raises(IntegrityError, match="head"):
        files.last_ledger()


def test_a_page_and_a_command_give_the_same_errors(tmp_path: Path) -> None:
    """A path of another stream, a lost manifest, a damaged head.json: the same class, which gives the
    exit code, the same words and the same advice.
    """
    made = create_filled_output(tmp_path / "s")
    store = LocalStore(made.root)

    def errors(stream: str) -> list[tuple[type[SeriatimError], str]]:
        """What the two readers say, in the order of the command and the page."""
        made.open()
        with pytest.raises(SeriatimError) as of_command:
            read_head(made.ledger, stream)
        with pytest.raises(SeriatimError) as of_page:
            StatusFiles(store, stream).last_ledger()
        return [(type(caught.value), caught.value.render()) for caught in (of_command, of_page)]

    command, page = errors("other")
    assert command == page
    assert issubclass(command[0], ConfigError)
    last = max((made.root / "manifests").iterdir())
    last.unlink()
    command, page = errors("s")
    assert command == page
    assert command[0] is IntegrityError
    assert "it is missing" in command[1]
    (made.root / "head.json").write_text("{")
    command, page = errors("s")
    assert command == page
    assert "head.json cannot be read" in command[1]
    assert "or move it away" in command[1]


def test_the_status_file_comes_back_as_it_was_put(tmp_path: Path) -> None:
    """What is no status of ours is none at all."""
    made = DiskStream(tmp_path / "s")
    made.root.mkdir()
    files, status = (
        StatusFiles(LocalStore(made.root)),
        StreamStatus(stream="s", at_seconds=1.5, gaps_open=3),
    )
    files.write_status(status)
    assert files.read_status() == status
    (made.root / "status.json").write_bytes(b'{"at_seconds": "soon"}')
    assert files.read_status() is None


def test_the_keys_of_the_status_file_stay(tmp_path: Path) -> None:
    """Others read it too. More sessions in quarantine than the file lists are only counted."""
    (tmp_path / "s").mkdir()
    sessions = [QuarantinedSession(session=f"s{n}", topic="t", partition=0) for n in range(300)]
    status = StreamStatus(
        stream="s",
        at_seconds=1.5,
        partitions=[PartitionStatus(topic="t", partition=0, unread=7, counts={"poison": 1})],
        quarantined=sessions,
        quarantined_count=300,
    )
    StatusFiles(LocalStore(tmp_path / "s")).write_status(status)
    content = msgspec.json.decode((tmp_path / "s" / "status.json").read_bytes())
    assert len(content.pop("quarantined")) == 200
    assert content == {
        "stream": "s",
        "at_seconds": 1.5,
        "sequence": -1,
        "ran_seconds": None,
        "tier": "",
        "verdict": "new",
        "circuit": "closed",
        "checked": 0,
        "rate": None,
        "partitions": [
            {
                "topic": "t",
                "partition": 0,
                "frontier": None,
                "log_start": None,
                "log_end": None,
                "lag": None,
                "time_left_seconds": None,
                "limit_seconds": None,
                "catches_up": None,
                "topic_state": "live",
                "epoch": 0,
                "held": None,
                "halted": None,
            }
        ],
        "quarantined_count": 300,
        "sessions_max": None,
        "holds": [],
        "published": None,
        "snapshot_requests": "",
        "gaps_open": None,
        "concerns": [],
    }


def test_the_status_file_of_an_older_version_is_read(tmp_path: Path) -> None:
    """As 0.2.0 wrote it; keys that came or went since do no harm."""
    (tmp_path / "status.json").write_text(
        '{"stream":"s","at_seconds":1000.5,"sequence":4,"ran_seconds":990.0,"tier":"strict",'
        '"verdict":"hurt","circuit":"closed","checked":3,"rate":2.5,"partitions":[{"topic":"t",'
        '"partition":0,"frontier":25,"log_start":0,"log_end":30,"lag":5,"time_left_seconds":7200,'
        '"limit_seconds":3600.0,"catches_up":true,"topic_state":"live","epoch":1,"held":null,'
        '"halted":{"finding":"gap","offset":25,"cause":"unexplained"}}],"quarantined":[],'
        '"quarantined_count":0,"gaps_open":1,"concerns":[{"concern":"halted","place":"t/0",'
        '"text":"halted","next":"seriatim status s"}],"a_key_of_then":1}'
    )
    status = StatusFiles(LocalStore(tmp_path), "s").read_status()
    assert status is not None
    (partition,) = status.partitions
    assert partition.halt == HaltStatus("gap", 25, "unexplained")
    assert (partition.time_left_seconds, status.last_run_seconds, status.gaps_open) == (
        7200,
        990.0,
        1,
    )
    assert [concern.key for concern in status.concerns] == ["halted t/0"]
