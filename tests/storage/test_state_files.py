"""State files on disk: in blocks, and those of before in Parquet, packed or with a column per field."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import encode
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session, pack_session
from seriatim.storage import state_files
from seriatim.storage.state_blocks import has_blocks
from seriatim.storage.state_files import StateFiles
from seriatim.storage.store import LocalStore
from tests.engine.test_session import stored_sessions

P = Partition("in-a", 0)
FORMAT_3_SCHEMA = pa.schema(
    [
        ("session", pa.string()),
        ("state", pa.binary()),
        ("state_version", pa.int32()),
        ("sequence", pa.int64()),
        ("anchor", pa.int64()),
        ("fingerprint", pa.binary()),
        ("missing", pa.binary()),
        ("waiting", pa.binary()),
        ("damaged", pa.int64()),
        ("since_snapshot", pa.int64()),
        ("snapshot_timestamp", pa.int64()),
        ("reach_ms", pa.int64()),
        ("first_offset", pa.int64()),
        ("last_offset", pa.int64()),
        ("snapshot_offset", pa.int64()),
        ("timestamp", pa.int64()),
        ("status", pa.string()),
        ("finding", pa.string()),
        ("finding_offset", pa.int64()),
    ]
)
"""The columns of a state file until format 3."""
FORMS = ["blocks", "packed Parquet", "format 3"]
RUNS = count()
MANY_RUNS = settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SESSIONS = st.dictionaries(st.sampled_from("abcdef"), stored_sessions(), min_size=1)


def format_3_row(name: str, session: Session) -> dict[str, Any]:
    """A row as format 3 wrote it."""
    return {
        "session": name,
        "state": session.state_bytes,
        "state_version": session.state_version,
        "sequence": session.sequence,
        "anchor": session.snapshot_sequence,
        "fingerprint": session.snapshot_fingerprint,
        "missing": encode(session.missing_sequences) if session.missing_sequences else None,
        "waiting": encode(session.waiting_messages) if session.waiting_messages else None,
        "damaged": session.damaged_since_offset,
        "since_snapshot": session.messages_since_snapshot,
        "snapshot_timestamp": session.snapshot_timestamp,
        "reach_ms": session.snapshot_distance_ms,
        "first_offset": session.first_offset,
        "last_offset": session.last_offset,
        "snapshot_offset": session.snapshot_offset,
        "timestamp": session.timestamp,
        "status": "live" if session.finding is None else "quarantined",
        "finding": session.finding,
        "finding_offset": session.finding_offset,
    }


def save_format_3(root: Path, stem: str, sessions: Mapping[str, Session]) -> File:
    """A state file as format 3 wrote it."""
    rows = [format_3_row(name, session) for name, session in sessions.items()]
    return save_parquet(root, stem, pa.Table.from_pylist(rows, schema=FORMAT_3_SCHEMA))


def save_parquet(root: Path, stem: str, table: pa.Table) -> File:
    """A Parquet file of these sessions, several row groups long."""
    path = root / f"state/{P}/{stem}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2, write_page_checksum=True)
    content = path.read_bytes()
    return File(
        path=path.relative_to(root).as_posix(),
        size_bytes=len(content),
        rows=table.num_rows,
        digest=xxhash.xxh3_128(content).hexdigest(),
    )


def save_packed_parquet(root: Path, stem: str, sessions: Mapping[str, Session]) -> File:
    """A state file in Parquet, with one column of packed sessions, as it was written before blocks."""
    columns = {
        "session": list(sessions),
        "finding": [session.finding for session in sessions.values()],
        "packed": [pack_session(session) for session in sessions.values()],
    }
    schema = pa.schema(
        [("session", pa.string()), ("finding", pa.string()), ("packed", pa.binary())]
    )
    return save_parquet(root, stem, pa.Table.from_pydict(columns, schema=schema))


def save_in_form(
    state: StateFiles, root: Path, form: str, stem: str, sessions: Mapping[str, Session]
) -> File:
    """A state file in one of the forms that are read."""
    if form == "format 3":
        return save_format_3(root, stem, sessions)
    if form == "packed Parquet":
        return save_packed_parquet(root, stem, sessions)
    (file,) = state.save(P, stem, sessions, [])
    return file


@pytest.fixture
def state(tmp_path: Path) -> StateFiles:
    """A store without files."""
    return StateFiles(LocalStore(tmp_path), "s")


def read_everything(root: Path, files: list[File]) -> list[dict[str, Session]]:
    """All sessions of files in each way in which they can be read, by a process that knows nothing
    yet: one by one, by name, and those in quarantine.
    """
    state = StateFiles(LocalStore(root), "s")
    return [
        dict(state.all_sessions(files)),
        state.load(files, "abcdefg"),
        state.quarantined_sessions(files),
    ]


@given(
    st.lists(st.tuples(SESSIONS, st.sampled_from(FORMS)), min_size=1, max_size=4), st.integers(0, 4)
)
@MANY_RUNS
def test_files_of_all_forms_are_one_state(
    tmp_path: Path, state: StateFiles, slices: list[tuple[dict[str, Session], str]], merged: int
) -> None:
    """Read together, and merged together: any session is what it was, whoever wrote it, and what is
    merged is in blocks.
    """
    run = next(RUNS)
    files = []
    expected: dict[str, Session] = {}
    for number, (sessions, form) in enumerate(slices):
        files.append(save_in_form(state, tmp_path, form, f"{run}-{number}", sessions))
        expected |= sessions
    quarantined = {name: one for name, one in expected.items() if one.finding is not None}
    assert read_everything(tmp_path, files) == [expected, expected, quarantined]
    assert StateFiles(LocalStore(tmp_path), "s").find_names(files, ["a", "g"]) == {"a"} & set(
        expected
    )
    new = {"f": Session(state_bytes=b"new")}
    unmerged = len(files) - min(merged, len(files))
    (whole,) = state.save(P, f"{run}-whole", new, files[unmerged:])
    files[unmerged:] = [whole]
    expected |= new
    quarantined.pop("f", None)
    assert read_everything(tmp_path, files) == [expected, expected, quarantined]
    with LocalStore(tmp_path).open(whole.path) as content:
        assert has_blocks(pq.ParquetFile(content))


@pytest.mark.parametrize("form", FORMS)
def test_quarantine_is_found_by_its_column_alone(
    tmp_path: Path, state: StateFiles, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Of many sessions only the one in quarantine is unpacked; one that left it since is live."""
    hurt = Session(state_bytes=b"1", finding="gap", finding_offset=7)
    sessions = {f"s{number}": Session(state_bytes=b"1") for number in range(9)}
    sessions |= {"hurt": hurt, "healed": replace(hurt, finding="poison")}
    older = save_in_form(state, tmp_path, form, "0-0-a", sessions)
    (newer,) = state.save(P, "0-5-a", {"healed": Session(state_bytes=b"2")}, [])
    unpacked = []
    unpack = state_files.unpack_session

    def counted(packed: bytes) -> Session:
        unpacked.append(packed)
        return unpack(packed)

    monkeypatch.setattr(state_files, "unpack_session", counted)
    assert StateFiles(LocalStore(tmp_path), "s").quarantined_sessions([older, newer]) == {
        "hurt": hurt
    }
    assert len(unpacked) == 1
