"""Scratch: the folder that a replay writes, and what it says of itself. Never within a stream's
output.

`replay.json` comes last: a folder without it is what a replay left that was stopped.

Next room: operations/inspect/replay.py folds; cli/replay_range.py joins the two; lookup.py reads
the table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import Schema
from deltalake.transaction import AddAction, create_table_with_add_actions

from seriatim.config import expand_user
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.record_kinds import table_directory
from seriatim.engine.session import Session
from seriatim.errors import BrokenPromiseError, ConfigError
from seriatim.ledger.model import File
from seriatim.ports import StateStore
from seriatim.storage.files import write_file
from seriatim.stream_files import describe_url_problem

MANIFEST_FILE = "replay.json"


def resolve_path(target: Path) -> Path:
    """Where a path leads, whatever links are on the way. One that leads nowhere is refused."""
    named = expand_user(target, f"--to {target}", "give a folder").absolute()
    try:
        lost = next(
            (one for one in (named, *named.parents) if one.is_symlink() and not one.exists()), None
        )
        folder = named.resolve()
    except (OSError, RuntimeError):  # a circle of links
        lost = named
    if lost is not None:
        raise ConfigError(
            f"--to {target}: {lost} is a link that leads nowhere",
            next="give a folder, without this link",
        )
    return folder


def create_folder(folder: Path) -> None:
    """Make the folder, where that can be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--to {folder}: it cannot be made: {error.strerror or error}",
            next="give a folder where you may write",
        ) from None


def remove_if_empty(folder: Path) -> None:
    """Leave no folder behind in which nothing is."""
    with suppress(OSError):
        folder.rmdir()


def refuse_unusable_folder(folder: Path) -> None:
    """Refuse a folder that has something in it, lies within an output or a file, or can hold no
    Delta table.
    """
    if trouble := describe_url_problem(folder):
        raise ConfigError(f"--to {folder}: {trouble}", next="give a folder with a plainer name")
    for parent in (folder, *folder.parents):
        if (parent / "head.json").exists() or (parent / "records" / "_delta_log").is_dir():
            what = (
                "a replay is in it already"
                if (parent / MANIFEST_FILE).exists()
                else f"{parent} is an output"
            )
            raise ConfigError(
                f"--to {folder}: {what}", next="give a folder of its own, that does not exist yet"
            )
    for parent in folder.parents:
        if parent.exists() and not parent.is_dir():
            raise ConfigError(
                f"--to {folder}: {parent} is a file", next="give a folder, below folders"
            )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "it is not empty" if folder.is_dir() else "it is a file"
        raise ConfigError(
            f"--to {folder}: {what}", next="give a folder that does not exist yet, or is empty"
        )


def create_table(root: Path, table: str, schema: pa.Schema, files: Iterable[File]) -> None:
    """Make a Delta table of record files that are there."""
    (root / table_directory(table)).mkdir(parents=True, exist_ok=True)
    adds = [
        AddAction(
            path=file.path.removeprefix(f"{table_directory(table)}/"),
            size=file.size_bytes,
            partition_values={},
            modification_time=int(time.time() * 1000),
            data_change=True,
            stats=json.dumps(
                {
                    "numRecords": file.rows,
                    "minValues": {"offset": file.first_offset},
                    "maxValues": {"offset": file.last_offset},
                }
            ),
        )
        for file in files
    ]
    settings = {"delta.dataSkippingStatsColumns": "offset"}
    path = str(root / table_directory(table))
    create_table_with_add_actions(
        path, Schema.from_arrow(schema), adds, mode="error", configuration=settings
    )


def write_manifest(root: Path, values: Mapping[str, Any]) -> None:
    """Say what the folder is."""
    write_file(root / MANIFEST_FILE, json.dumps(dict(values), indent=1).encode())


def read_manifest(root: Path) -> dict[str, Any]:
    """What a folder says it is."""
    try:
        found: dict[str, Any] = json.loads((root / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{root}: it has no {MANIFEST_FILE}: no replay, or one that was stopped",
            next="give the name of a stream, or a folder that `seriatim replay … --to` wrote to its end",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{root / MANIFEST_FILE}: {error}", next="fold the range again into another folder"
        ) from None
    return found


def folded_ranges(root: Path) -> dict[tuple[Partition, str], OffsetRange]:
    """Which offsets a replay has folded."""
    told = read_manifest(root)
    try:
        return {
            (
                Partition(str(part["topic"]), int(part["partition"])),
                str(part["topic_id"]),
            ): OffsetRange(int(part["from"]), int(part["until"]))
            for part in told["partitions"]
        }
    except (KeyError, TypeError, ValueError, AttributeError, BrokenPromiseError):
        raise ConfigError(
            f"{root / MANIFEST_FILE}: it is damaged: it does not say which offsets were folded",
            next="fold the range again into another folder",
        ) from None


class LayeredState:
    """State of a replay: sessions it has saved itself, over those of the stream that it began with."""

    def __init__(
        self, replay_state: StateStore, base_state: StateStore, base_files: tuple[File, ...]
    ) -> None:
        self.replay_state, self.base_state, self.base_files = replay_state, base_state, base_files

    def load(self, files: Iterable[File], names: Iterable[str]) -> dict[str, Session]:
        """Those that were saved meanwhile, and the rest as they were in the beginning."""
        wanted = list(names)
        found = self.replay_state.load(files, wanted)
        return {
            **self.base_state.load(self.base_files, [name for name in wanted if name not in found]),
            **found,
        }

    def find_names(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these names are there."""
        wanted = list(names)
        return self.replay_state.find_names(files, wanted) | self.base_state.find_names(
            self.base_files, wanted
        )

    def save(
        self,
        partition: Partition,
        stem: str,
        sessions: Mapping[str, Session],
        files_to_merge: Iterable[File],
    ) -> File:
        """Into the replay's own folder."""
        return self.replay_state.save(partition, stem, sessions, files_to_merge)

    def all_sessions(self, files: Iterable[File]) -> Iterable[tuple[str, Session]]:
        """Those that were saved meanwhile."""
        return self.replay_state.all_sessions(files)

    def quarantined_sessions(self, files: Iterable[File]) -> dict[str, Session]:
        """The same, of those in quarantine."""
        return self.replay_state.quarantined_sessions(files)
