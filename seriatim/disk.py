"""The disk: files that are really there before anybody is told their names.

Used by the adapters that write files; nothing here knows what is inside them.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import xxhash

BLOCK_BYTES = 1 << 20


def sync(path: Path) -> None:
    """See a file, and its name, onto the disk."""
    for target in (path, path.parent):
        descriptor = os.open(target, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Put a whole file in place at once: readers see the old one or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        draft.write_bytes(content)
        sync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path)


def file_digest(path: Path) -> str:
    """XXH3-128 of a whole file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def file_names(folder: Path) -> list[str]:
    """The names in a folder; none if there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
