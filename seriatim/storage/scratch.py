"""The scratch folder that a replay writes, and its description. It is never inside the output of a
stream.

`replay.json` is written last: a folder without it was left by a replay that was stopped.

Next: operations/inspect/replay.py folds; cli/replay_range.py joins the two; record_query.py reads
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
    """The path with all links resolved. A link that leads nowhere is refused."""
    absolute = expand_user(target, f"--to {target}", "give a folder").absolute()
    try:
        broken_link = _find_broken_link(absolute)
        folder = absolute.resolve()
    except (OSError, RuntimeError):
        # Links that lead to each other in a circle.
        broken_link = absolute
    if broken_link is not None:
        raise ConfigError(
            f"--to {target}: {broken_link} is a link that leads nowhere",
            next="give a folder, without this link",
        )
    return folder


def _find_broken_link(path: Path) -> Path | None:
    for candidate in (path, *path.parents):
        if candidate.is_symlink() and not candidate.exists():
            return candidate
    return None


def create_folder(folder: Path) -> None:
    """Create the folder, or refuse it if that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--to {folder}: it cannot be made: {error.strerror or error}",
            next="give a folder where you may write",
        ) from None


def remove_if_empty(folder: Path) -> None:
    """Delete the folder if nothing is in it."""
    with suppress(OSError):
        folder.rmdir()


def refuse_unusable_folder(folder: Path) -> None:
    """Refuse a folder that is not empty, is inside an output or a file, or cannot hold a Delta
    table.
    """
    problem = describe_url_problem(folder)
    if problem:
        raise ConfigError(f"--to {folder}: {problem}", next="give a folder with a plainer name")
    for parent in (folder, *folder.parents):
        has_ledger = (parent / "head.json").exists()
        if not has_ledger and not (parent / "records" / "_delta_log").is_dir():
            continue
        problem = f"{parent} is an output"
        if (parent / MANIFEST_FILE).exists():
            problem = "a replay is in it already"
        raise ConfigError(
            f"--to {folder}: {problem}",
            next="give a folder of its own, that does not exist yet",
        )
    for parent in folder.parents:
        if parent.exists() and not parent.is_dir():
            raise ConfigError(
                f"--to {folder}: {parent} is a file", next="give a folder, below folders"
            )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = "it is not empty" if folder.is_dir() else "it is a file"
        raise ConfigError(
            f"--to {folder}: {problem}", next="give a folder that does not exist yet, or is empty"
        )


def create_table(
    root: Path,
    table: str,
    schema: pa.Schema,
    files: Iterable[File],
) -> None:
    """Create a Delta table of record files that are there already."""
    folder = table_directory(table)
    (root / folder).mkdir(parents=True, exist_ok=True)
    create_table_with_add_actions(
        str(root / folder),
        Schema.from_arrow(schema),
        [_add_action(folder, file) for file in files],
        mode="error",
        configuration={"delta.dataSkippingStatsColumns": "offset"},
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


def write_manifest(root: Path, values: Mapping[str, Any]) -> None:
    """Write the description of the folder."""
    write_file(root / MANIFEST_FILE, json.dumps(dict(values), indent=1).encode())


def read_manifest(root: Path) -> dict[str, Any]:
    """The description of a folder that a replay wrote. Any other folder is refused."""
    try:
        manifest: dict[str, Any] = json.loads((root / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{root}: it has no {MANIFEST_FILE}: no replay, or one that was stopped",
            next="give the name of a stream, "
            "or a folder that `seriatim replay … --to` wrote to its end",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{root / MANIFEST_FILE}: {error}", next="fold the range again into another folder"
        ) from None
    return manifest


def folded_ranges(root: Path) -> dict[tuple[Partition, str], OffsetRange]:
    """The offsets that a replay has folded, by partition and topic id."""
    manifest = read_manifest(root)
    ranges = {}
    try:
        for described in manifest["partitions"]:
            partition = Partition(str(described["topic"]), int(described["partition"]))
            offset_range = OffsetRange(int(described["from"]), int(described["until"]))
            ranges[partition, str(described["topic_id"])] = offset_range
    except (KeyError, TypeError, ValueError, AttributeError, BrokenPromiseError):
        raise ConfigError(
            f"{root / MANIFEST_FILE}: it is damaged: it does not say which offsets were folded",
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
        base_files: tuple[File, ...],
    ) -> None:
        self.replay_state = replay_state
        self.base_state = base_state
        self.base_files = base_files

    def load(self, files: Iterable[File], names: Iterable[str]) -> dict[str, Session]:
        """The named sessions: those that were saved meanwhile, the others as they were at the
        start.
        """
        all_names = list(names)
        saved = self.replay_state.load(files, all_names)
        other_names = [name for name in all_names if name not in saved]
        return {**self.base_state.load(self.base_files, other_names), **saved}

    def find_names(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these sessions there are."""
        all_names = list(names)
        saved = self.replay_state.find_names(files, all_names)
        return saved | self.base_state.find_names(self.base_files, all_names)

    def save(
        self,
        partition: Partition,
        stem: str,
        sessions: Mapping[str, Session],
        files_to_merge: Iterable[File],
    ) -> File:
        """Save sessions into the replay's own folder."""
        return self.replay_state.save(partition, stem, sessions, files_to_merge)

    def all_sessions(self, files: Iterable[File]) -> Iterable[tuple[str, Session]]:
        """The sessions that were saved meanwhile."""
        return self.replay_state.all_sessions(files)

    def quarantined_sessions(self, files: Iterable[File]) -> dict[str, Session]:
        """The sessions that were saved meanwhile and are in quarantine."""
        return self.replay_state.quarantined_sessions(files)
