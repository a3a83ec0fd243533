"""A store in memory: the fake of storage/store.py, for tests and simulations.

Next: tests/contracts/test_store.py runs the same tests on it and on the real stores.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from seriatim.errors import SeriatimError
from seriatim.storage.store import AlreadyThereError, Buffer, HashingSink, Sink

if TYPE_CHECKING:
    import pyarrow as pa


class MemoryStore:
    """Objects in a dictionary."""

    is_remote = False

    def __init__(self) -> None:
        self.url = "memory://"
        self.address = self.url
        self.objects: dict[str, bytes] = {}
        self.drafts: dict[str, list[bytearray]] = {}
        """Objects that were begun and not finished, one for each writer of a key."""

    def uri(self, key: str) -> str:
        """The address of an object."""
        return f"{self.url}{key}"

    def create(self, key: str, content: Buffer) -> None:
        """Write an object that must not be there yet."""
        if self.objects.setdefault(key, bytes(content)) != bytes(content):
            raise AlreadyThereError(errno.EEXIST, "other content is there already", key)

    def replace(self, key: str, content: Buffer) -> None:
        """Write an object, whether it is there or not."""
        self.objects[key] = bytes(content)

    def writer(self, key: str) -> Sink:
        """Begin a large object."""
        return _MemorySink(self, key)

    def read(self, key: str) -> bytes:
        """A whole object."""
        try:
            return self.objects[key]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such object", key) from None

    def read_again(self, key: str, digest: str) -> bytes:
        """A whole object."""
        return self.read(key)

    def blocks(self, key: str) -> Iterator[Buffer]:
        """The content, as one block."""
        yield self.read(key)

    def open(self, key: str) -> pa.NativeFile:
        """Open an object for reading parts of it."""
        import pyarrow as pa

        return pa.BufferReader(self.read(key))

    def size(self, key: str) -> int | None:
        """The size in bytes; None if there is no such object."""
        content = self.objects.get(key)
        return None if content is None else len(content)

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """The size of each object, or None."""
        return [self.size(key) for key in keys]

    def keys(self, prefix: str, after: str = "") -> Iterator[tuple[str, int]]:
        """The objects below a prefix, with their sizes, sorted by key."""
        sizes: dict[str, int] = {}
        for key, content in self.objects.items():
            if key.startswith(prefix) and key > after:
                sizes[key] = len(content)
        # The list is made at once, because callers delete while they iterate.
        return iter(sorted(sizes.items()))

    def stamps(self, prefix: str) -> dict[str, str]:
        """The content itself, for each object right below a prefix."""
        stamps: dict[str, str] = {}
        for key, content in self.objects.items():
            is_right_below = "/" not in key.removeprefix(prefix)
            if key.startswith(prefix) and is_right_below:
                stamps[key] = content.hex()
        return stamps

    def folders(self, prefix: str) -> list[str]:
        """The names between the prefix and the next "/"."""
        rests = [key.removeprefix(prefix) for key in self.objects if key.startswith(prefix)]
        return sorted({rest.partition("/")[0] for rest in rests if "/" in rest})

    def unfinished_keys(self, prefix: str) -> Iterator[str]:
        """The keys of objects that were begun and not finished."""
        return iter(sorted(key for key in self.drafts if key.startswith(prefix)))

    def delete(self, keys: Iterable[str]) -> list[str]:
        """Delete objects, finished or not; the keys that were there."""
        deleted = []
        for key in set(keys):
            content = self.objects.pop(key, None)
            draft = self.drafts.pop(key, None)
            if content is not None or draft is not None:
                deleted.append(key)
        return sorted(deleted)

    def delete_unfinished(self, prefix: str, *, nested: bool = True) -> list[str]:
        """Delete what was begun and not finished; the keys."""
        keys = list(self.unfinished_keys(prefix))
        if not nested:
            keys = [key for key in keys if "/" not in key.removeprefix(prefix)]
        for key in keys:
            del self.drafts[key]
        return keys

    def copy(self, key: str, to: str) -> None:
        """Copy an object."""
        self.create(to, self.read(key))

    def delta_options(self) -> dict[str, str]:
        """Delta's library knows nothing of this store."""
        return {}

    def refuse_if_unsafe(self) -> None:
        """Nothing: a dictionary has one value for a key."""

    def sync_delta_log(self, table: str, version: int | None = None) -> None:
        """Memory survives no power cut."""

    def explain_error(self, error: BaseException) -> SeriatimError | None:
        """Nothing: Delta's library knows nothing of this store."""
        return None


class _MemorySink(HashingSink):
    """Gathers an object, and puts it into the store when it is finished."""

    def __init__(self, store: MemoryStore, key: str) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._content = bytearray()
        store.drafts.setdefault(key, []).append(self._content)

    def _append(self, view: memoryview) -> None:
        self._content += view

    def _publish(self) -> None:
        if not self._end_draft():
            raise FileNotFoundError(errno.ENOENT, "the unfinished object was deleted", self._key)
        if self._key in self._store.objects:
            raise AlreadyThereError(
                errno.EEXIST, "an object of this name is there already", self._key
            )
        self._store.objects[self._key] = bytes(self._content)

    def _give_up(self) -> None:
        self._end_draft()

    def _end_draft(self) -> bool:
        """Take this writer's draft out of the store; False if it was deleted before."""
        drafts = self._store.drafts.get(self._key, [])
        # By identity: drafts of two writers may have the same content.
        others = [draft for draft in drafts if draft is not self._content]
        if others:
            self._store.drafts[self._key] = others
        else:
            self._store.drafts.pop(self._key, None)
        return len(others) < len(drafts)
