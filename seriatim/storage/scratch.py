"""The scratch folder that a replay writes, and its description. It is never inside the output of a
stream.

`replay.json` is written last: a folder without it was left by a replay that was stopped.

Next: operations/inspect/replay.py folds; cli/replay.py joins the two; record_query.py reads
the table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from deltalake import Schema
from deltalake.transaction import AddAction, create_table_with_add_actions

from seriatim.engine.files import File, Files, StateStore
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.records import table_directory
from seriatim.engine.session import Session, SessionsByName
from seriatim.errors import BrokenPromiseError, ConfigError
from seriatim.storage.store import Store

MANIFEST_FILE = "replay.json"


def create_table(
    store: Store,
    table: str,
    schema: pa.Schema,
    files: Iterable[File],
) -> None:
    """Create a Delta table of record files that are there already."""
    folder = table_directory(table)
    create_table_with_add_actions(
        f"{store.url}/{folder}",
        Schema.from_arrow(schema),
        [_add_action(folder, file) for file in files],
        mode="error",
        configuration={"delta.dataSkippingStatsColumns": "offset"},
        storage_options=store.delta_options(),
    )


def _add_action(folder: str, file: File) -> AddAction:
    stats = {
        "numRecords": file.rows,
        "minValues": {"offset": file.first_offset},
        "maxValues": {"offset": file.last_offset},
    }
    return AddAction(
        path=file.path.removeprefix(f"{folder}/"),
        size=file.size_bytes,
        partition_values={},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=json.dumps(stats),
    )


def write_manifest(store: Store, values: Mapping[str, Any]) -> None:
    """Write the description of the folder."""
    store.create(MANIFEST_FILE, json.dumps(dict(values), indent=1).encode())


def read_manifest(store: Store) -> dict[str, Any]:
    """The description of a folder that a replay wrote. Any other folder is refused."""
    try:
        manifest: dict[str, Any] = json.loads(store.read(MANIFEST_FILE))
    except FileNotFoundError:
        raise ConfigError(
            f"{store.url}: it has no {MANIFEST_FILE}: no replay, or one that was stopped",
            next="give the name of a stream, "
            "or a folder that `seriatim replay … --to` wrote to its end",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{store.url}/{MANIFEST_FILE}: {error}", next="fold the range again into another folder"
        ) from None
    return manifest


def folded_ranges(store: Store) -> dict[tuple[Partition, str], OffsetRange]:
    """The offsets that a replay has folded, by partition and topic id."""
    manifest = read_manifest(store)
    ranges = {}
    try:
        for described in manifest["partitions"]:
            partition = Partition(str(described["topic"]), int(described["partition"]))
            offset_range = OffsetRange(int(described["from"]), int(described["until"]))
            ranges[partition, str(described["topic_id"])] = offset_range
    except (KeyError, TypeError, ValueError, AttributeError, BrokenPromiseError):
        raise ConfigError(
            f"{store.url}/{MANIFEST_FILE}: it is damaged: it does not say which offsets were folded",
            next="fold the range again into another folder",
        ) from None
    return ranges


class LayeredState:
    """The state of a replay: sessions that it has saved itself, on top of those of the stream with
    which it began.
    """

    def __init__(
        self,
        replay_state: StateStore,
        base_state: StateStore,
        base_files: Files,
    ) -> None:
        self.replay_state = replay_state
        self.base_state = base_state
        self.base_files = base_files

    def load(self, files: Iterable[File], names: Iterable[str]) -> SessionsByName:
        """The named sessions: those that were saved meanwhile, the others as they were at the
        start.
        """
        all_names = list(names)
        saved = self.replay_state.load(files, all_names)
        other_names = [name for name in all_names if name not in saved]
        return {**self.base_state.load(self.base_files, other_names), **saved}

    open_sessions = load
    """What is saved must be whole: the parts of its rows would lie in two stores."""

    def find_names(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these sessions there are."""
        all_names = list(names)
        saved = self.replay_state.find_names(files, all_names)
        return saved | self.base_state.find_names(self.base_files, all_names)

    def save(
        self,
        partition: Partition,
        stem: str,
        sessions: SessionsByName,
        files_to_merge: Iterable[File],
    ) -> Files:
        """Save sessions into the replay's own folder."""
        return self.replay_state.save(partition, stem, sessions, files_to_merge)

    def all_sessions(
        self, files: Iterable[File], *, with_rows: bool = True
    ) -> Iterable[tuple[str, Session]]:
        """The sessions that were saved meanwhile."""
        return self.replay_state.all_sessions(files, with_rows=with_rows)

    def quarantined_sessions(self, files: Iterable[File]) -> SessionsByName:
        """The sessions that were saved meanwhile and are in quarantine."""
        return self.replay_state.quarantined_sessions(files)
