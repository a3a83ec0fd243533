"""The store: everything that a stream writes, as objects below one root. The only module that knows how
an output is on a disk.

An object has a key: a relative path, joined by "/". There is no rename, no append, no lock, no change
time and no folder. If two processes must not both write something, a number in the key and `create`
decide who was first, as in the log of a Delta table.

`LocalStore` keeps objects on a local or mounted disk, `ObjectStore` (storage/object_store.py) in a bucket;
`MemoryStore` (memory/store.py) is the fake.
tests/contracts/test_store.py runs on every store.

Next: storage/parquet.py writes Parquet files into a store; storage/delta_table.py has Delta tables.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol

import xxhash

from seriatim.errors import ConfigError, SeriatimError, ensure

if TYPE_CHECKING:
    import pyarrow as pa

BUCKET_SCHEME = re.compile(r"(?:(?P<store>\w+)\+)?(?P<scheme>s3|gs|abfss)://")
"""How an address of a bucket begins. It may have the name of a store in front."""
Buffer = bytes | bytearray | memoryview
BLOCK_BYTES = 1 << 20
new_sha256 = hashlib.sha256
"""A bench replaces it, to measure what it costs."""
DRAFT_TRIES_MAX = 5
DRAFT_NAME = re.compile(r"\.(.+)\.[0-9a-f]{8}")
"""A draft has the name that its file will get, between a dot and a random part."""
COMMIT_FILE_NAME = re.compile(r"\d{20}\.json")
UNSYNCED_COMMITS_MAX = 16
"""How many commits back may still be unsynced: as many processes in a row were killed between a
commit and its sync. More than this never happens.
"""


class AlreadyThereError(OSError):
    """`create` or `copy` met an object with other content under its key."""


def refuse_other_content(key: str, content: Buffer, read: Callable[[str], bytes]) -> None:
    """Refuse a key that is taken, unless its object has this content: then it is our own, from a try
    whose answer was lost.
    """
    try:
        present = read(key)
    except FileNotFoundError:
        reason = "an object was there, and was deleted meanwhile"
        raise AlreadyThereError(errno.EEXIST, reason, key) from None
    if present != bytes(content):
        raise AlreadyThereError(errno.EEXIST, "other content is there already", key)


class WrittenObject(NamedTuple):
    """What a sink knows about the object that it wrote."""

    size_bytes: int
    xxh3: str
    """XXH3-128 of the whole object."""
    sha256: str


class Sink(Protocol):
    """An object being written. Readers see nothing of it before it is finished."""

    closed: bool

    def write(self, content: Buffer) -> int: ...
    def flush(self) -> None: ...
    def tell(self) -> int:
        """The number of bytes so far."""
        ...

    def close(self) -> None:
        """Give up: the object does not come to be. After `finish` this does nothing."""

    def finish(self) -> WrittenObject:
        """Publish the object under its key, durably. `AlreadyThereError` if there is another one."""
        ...


class Store(Protocol):
    """Objects below one root. What is written is durable and complete, or it is not there.

    A missing object is a `FileNotFoundError`. Every other trouble is another `OSError`, or an error of
    ours where the store knows what a person must do: code that takes an `OSError` for damage of
    one file must not take a network that is down for it.
    """

    url: str
    """The root, as Delta's library takes it."""
    address: str
    """The root, as `open_store` takes it, also in another process."""
    is_remote: bool
    """Whether each call is a request to a server. Then whoever works with the store saves requests:
    it lists nothing that is not needed now, and reads an object once.
    """

    def uri(self, key: str) -> str:
        """The address of an object as browsers take it, with its scheme."""
        ...

    def create(self, key: str, content: Buffer) -> None:
        """Write an object that must not be there yet. `AlreadyThereError` if other content is there; the
        same content is no error, since the answer to an earlier try may have been lost.
        """

    def replace(self, key: str, content: Buffer) -> None:
        """Write an object, whether it is there or not. The last writer wins. It is for notes that only
        save work: readers see the old one or the new one, never a part.
        """

    def writer(self, key: str) -> Sink:
        """Begin an object that is too large to be written at once."""
        ...

    def read(self, key: str) -> bytes: ...
    def blocks(self, key: str) -> Iterator[Buffer]:
        """The content from the beginning to the end, in pieces of a bounded size."""
        ...

    def read_again(self, key: str, digest: str) -> bytes:
        """A whole object as it is now, which was probably read on this host before. `digest` is the
        XXH3-128 that it should have.
        """
        ...

    def open(self, key: str) -> pa.NativeFile:
        """Open an object for reading parts of it."""
        ...

    def size(self, key: str) -> int | None:
        """The size in bytes; None if there is no such object."""

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """The size of each object, or None, in the order of the keys. A server is asked in parallel."""
        ...

    def keys(self, prefix: str, after: str = "") -> Iterator[tuple[str, int]]:
        """The objects whose keys begin with `prefix` (empty, or ending with "/"), with their sizes,
        sorted by key. With `after`, only those whose keys sort after it.
        """
        ...

    def stamps(self, prefix: str) -> dict[str, str]:
        """The objects right below a prefix, by key: a text that is another one when the content is.
        So many objects are looked at by one request.
        """
        ...

    def folders(self, prefix: str) -> list[str]:
        """The names between `prefix` and the next "/" of all keys that have one there, sorted."""
        ...

    def unfinished_keys(self, prefix: str) -> Iterator[str]:
        """The keys of objects that were begun and not finished: their writers are at work, or were
        killed.
        """
        ...

    def delete(self, keys: Iterable[str]) -> list[str]:
        """Delete objects, finished or not; the keys that were there. A missing one is no error."""
        ...

    def delete_unfinished(self, prefix: str, *, nested: bool = True) -> list[str]:
        """Delete what was begun below a prefix and not finished; the keys. A finished object of the same
        key stays: it may be a note that was just being replaced. Without `nested`, objects whose key has
        a further "/" after the prefix stay.
        """
        ...

    def copy(self, key: str, to: str) -> None:
        """Copy an object. `AlreadyThereError` if other content is there."""

    def delta_options(self) -> dict[str, str]:
        """Options that Delta's library needs for tables in this store."""
        ...

    def refuse_if_unsafe(self) -> None:
        """Refuse a store in which `create` overwrites, or in which this process cannot write."""

    def sync_delta_log(self, table: str, version: int | None = None) -> None:
        """Make the last commits of the Delta table at key `table` durable, before anything is written
        that relies on them: `version` and the one before it, or the newest ones.
        """

    def explain_error(self, error: BaseException) -> SeriatimError | None:
        """What an error of Delta's library means for a person, if it is about the store and not about
        a table: credentials, the network. None: it is not.
        """


def open_store(output_path: str) -> Store:
    """The store of an output path: a folder, or an address of a bucket like `s3://bucket/prefix`. An
    address may begin with the name of its options: `lake+s3://bucket/prefix`.
    """
    if BUCKET_SCHEME.match(output_path):
        from seriatim.storage.object_store import open_object_store

        return open_object_store(output_path)
    if "://" in output_path:
        # As a path it would be a new folder below the current one.
        raise ConfigError(
            f"{output_path}: no store has such an address",
            allowed="a folder, or s3://BUCKET/PREFIX (gs://, abfss://)",
            next="fix the address",
        )
    return LocalStore(Path(output_path))


def digest_object(store: Store, key: str) -> str:
    """XXH3-128 of a whole object."""
    digest = xxhash.xxh3_128()
    for block in store.blocks(key):
        digest.update(block)
    return digest.hexdigest()


def xxh3_and_sha256(store: Store, key: str) -> tuple[str, str]:
    """XXH3-128 and SHA-256 of a whole object, in one reading."""
    xxh3 = xxhash.xxh3_128()
    sha256 = hashlib.sha256()
    for block in store.blocks(key):
        xxh3.update(block)
        sha256.update(block)
    return xxh3.hexdigest(), sha256.hexdigest()


class HashingSink:
    """Counts and hashes what is written. Stores say where it goes and how it is published."""

    def __init__(self) -> None:
        self.closed = False
        self._size_bytes = 0
        self._xxh3 = xxhash.xxh3_128()
        self._sha256 = new_sha256()

    def write(self, content: Buffer) -> int:
        """Take the next bytes."""
        view = memoryview(content).cast("B")
        if self.closed:
            # Arrow's Parquet writer writes its footer when it is collected, also after an error.
            return len(view)
        self._xxh3.update(view)
        self._sha256.update(view)
        self._size_bytes += len(view)
        self._append(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is seen before `finish`, so there is nothing to flush."""

    def tell(self) -> int:
        """The number of bytes so far."""
        return self._size_bytes

    def finish(self) -> WrittenObject:
        """Publish the object under its key."""
        ensure(not self.closed, "an object that was given up is not published")
        self._publish()
        self.closed = True
        return WrittenObject(self._size_bytes, self._xxh3.hexdigest(), self._sha256.hexdigest())

    def close(self) -> None:
        """Give the object up, unless it is finished."""
        if not self.closed:
            self.closed = True
            self._give_up()

    def _append(self, view: memoryview) -> None:
        raise NotImplementedError

    def _publish(self) -> None:
        raise NotImplementedError

    def _give_up(self) -> None:
        raise NotImplementedError


class LocalStore:
    """Objects as files below a folder. Each is synced to the disk before it gets its name, and the
    folder with the name is synced after it.
    """

    is_remote = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)
        self.address = self.url

    def path(self, key: str) -> Path:
        """Where an object is, for tests."""
        return self.root / key

    def uri(self, key: str) -> str:
        """The address of an object as browsers take it."""
        return (self.root / key).absolute().as_uri()

    def create(self, key: str, content: Buffer) -> None:
        """Write an object that must not be there yet."""
        try:
            self._write_draft_and_publish(key, content, _link_without_overwriting)
        except FileExistsError:
            refuse_other_content(key, content, self.read)

    def replace(self, key: str, content: Buffer) -> None:
        """Write an object, whether it is there or not."""
        self._write_draft_and_publish(key, content, os.replace)

    def _write_draft_and_publish(
        self, key: str, content: Buffer, publish: Callable[[Path, Path], None]
    ) -> None:
        path = self.root / key
        for tries_left in reversed(range(DRAFT_TRIES_MAX)):
            draft = _new_draft(path)
            try:
                with draft.open("xb") as file:
                    file.write(content)
                    _sync_file(file)
                publish(draft, path)
                break
            except FileNotFoundError:
                # Another run swept the draft: it cannot know that its writer is alive. Write it again.
                if not tries_left:
                    raise
            finally:
                draft.unlink(missing_ok=True)
        _sync_path(path.parent)

    def writer(self, key: str) -> Sink:
        """Begin a large object. It is written to a draft beside its final name."""
        return _LocalSink(self.root / key)

    def read(self, key: str) -> bytes:
        """A whole object."""
        return (self.root / key).read_bytes()

    def read_again(self, key: str, digest: str) -> bytes:
        """A whole object. The system has a cache of its own for files."""
        return self.read(key)

    def blocks(self, key: str) -> Iterator[Buffer]:
        """The content from the beginning to the end. It is read, not mapped: a whole file in memory
        would count as memory of this process, and a disk that fails would kill it.
        """
        with (self.root / key).open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def open(self, key: str) -> pa.NativeFile:
        """Open an object for reading parts of it.

        It is not mapped into memory: if a mapped file is cut short or its disk fails, the process is
        killed, and no error names the file.
        """
        import pyarrow as pa

        return pa.OSFile(str(self.root / key))

    def size(self, key: str) -> int | None:
        """The size in bytes; None if there is no such object."""
        try:
            # Called for each of ten thousand files of a commit, where building a Path would take as long
            # as asking the disk.
            status = os.stat(f"{self.url}/{key}")  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """The size of each object, or None."""
        return [self.size(key) for key in keys]

    def keys(self, prefix: str, after: str = "") -> Iterator[tuple[str, int]]:
        """The objects below a prefix, with their sizes, sorted by key."""
        found = []
        for path in self._files(prefix):
            if DRAFT_NAME.fullmatch(path.name):
                continue
            key = path.relative_to(self.root).as_posix()
            if key <= after:
                continue
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                found.append((key, path.stat().st_size))
        return iter(sorted(found))

    def stamps(self, prefix: str) -> dict[str, str]:
        """A text for each file of a folder. A new content is a new file: drafts are renamed."""
        stamps = {}
        for path in self._files(prefix, nested=False):
            if DRAFT_NAME.fullmatch(path.name):
                continue
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                status = path.stat()
                key = path.relative_to(self.root).as_posix()
                stamps[key] = f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
        return stamps

    def folders(self, prefix: str) -> list[str]:
        """The names of folders in a folder."""
        folder = self.root / prefix
        return [name for name in _names_in(folder) if (folder / name).is_dir()]

    def unfinished_keys(self, prefix: str) -> Iterator[str]:
        """The keys of drafts below a prefix."""
        return iter(sorted({key for key, _ in self._drafts(prefix)}))

    def _drafts(self, prefix: str, *, nested: bool = True) -> Iterator[tuple[str, Path]]:
        """The drafts below a prefix, with the key that each would get."""
        for path in self._files(prefix, nested=nested):
            draft = DRAFT_NAME.fullmatch(path.name)
            if draft:
                yield path.with_name(draft[1]).relative_to(self.root).as_posix(), path

    def _files(self, prefix: str, *, nested: bool = True) -> Iterator[Path]:
        for folder, _, names in os.walk(self.root / prefix, onerror=_raise_listing_error):
            for name in names:
                yield Path(folder) / name
            if not nested:
                return

    def delete(self, keys: Iterable[str]) -> list[str]:
        """Delete objects and drafts of them; the keys that were there."""
        names_by_folder: dict[Path, set[str]] = {}
        for key in keys:
            path = self.root / key
            names_by_folder.setdefault(path.parent, set()).add(path.name)
        deleted = set()
        for folder, names in names_by_folder.items():
            for present in _names_in(folder):
                draft = DRAFT_NAME.fullmatch(present)
                name = draft[1] if draft else present
                if name in names:
                    (folder / present).unlink(missing_ok=True)
                    deleted.add((folder / name).relative_to(self.root).as_posix())
        return sorted(deleted)

    def delete_unfinished(self, prefix: str, *, nested: bool = True) -> list[str]:
        """Delete the drafts below a prefix; the keys that they would have got."""
        keys = set()
        for key, path in self._drafts(prefix, nested=nested):
            path.unlink(missing_ok=True)
            keys.add(key)
        return sorted(keys)

    def copy(self, key: str, to: str) -> None:
        """Copy an object: a second name for the same bytes where the disk has hard links."""
        path = self.root / to
        draft = _new_draft(path)
        try:
            try:
                os.link(self.root / key, draft)
            except FileNotFoundError:
                raise
            except OSError:
                shutil.copyfile(self.root / key, draft)
                _sync_path(draft)
            _link_without_overwriting(draft, path)
        except FileExistsError:
            refuse_other_content(to, self.read(key), self.read)
        finally:
            draft.unlink(missing_ok=True)
        _sync_path(path.parent)

    def delta_options(self) -> dict[str, str]:
        """A local table needs none."""
        return {}

    def refuse_if_unsafe(self) -> None:
        """Nothing: a link never overwrites a name."""

    def sync_delta_log(self, table: str, version: int | None = None) -> None:
        """Sync the last commits of a Delta table to the disk.

        delta-rs does not fsync what it writes to a local log. After a power cut a commit may be gone,
        while a file of ours that was synced later is there.

        1. Choose the commits: `version` and the one before it. Without a version, the newest ones:
           earlier commits may be of a process that was killed before it got here.
        2. Sync their files, and the checkpoints that delta-rs may have written along with them.
        3. Sync the folder of the log, which has their names; for a new table the folders above it,
           too.
        """
        table_folder = self.root / table
        log = table_folder / "_delta_log"
        # 1. The commits.
        if version is None:
            versions = _newest_versions(log)
            if not versions:
                return
        else:
            versions = [version]
            # The commit before may be gone: a log may be cleaned up behind a checkpoint.
            if (log / f"{version - 1:020d}.json").exists():
                versions.insert(0, version - 1)
        # 2. Their files.
        for number in versions:
            _sync_path(log / f"{number:020d}.json")
            checkpoint = log / f"{number:020d}.checkpoint.parquet"
            if checkpoint.exists():
                _sync_path(checkpoint)
                _sync_path(log / "_last_checkpoint")
        # 3. The folders.
        _sync_path(log)
        if 0 in versions:
            _sync_path(table_folder)
            _sync_path(self.root)

    def explain_error(self, error: BaseException) -> SeriatimError | None:
        """Nothing: the errors of a disk name the file, and say enough."""
        return None


class _LocalSink(HashingSink):
    """Writes a draft beside the final name, and links it there when it is finished."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._draft = _new_draft(path)
        self._file: IO[bytes] = self._draft.open("xb")

    def _append(self, view: memoryview) -> None:
        self._file.write(view)

    def _publish(self) -> None:
        with self._file as file:
            _sync_file(file)
        try:
            _link_without_overwriting(self._draft, self._path)
        except FileExistsError:
            raise AlreadyThereError(
                errno.EEXIST, "an object of this name is there already", str(self._path)
            ) from None
        finally:
            self._draft.unlink(missing_ok=True)
        _sync_path(self._path.parent)

    def _give_up(self) -> None:
        self._file.close()
        self._draft.unlink(missing_ok=True)

    def __del__(self) -> None:
        # A task failed. Its draft is swept like that of a killed one; Python would warn of the file.
        self.closed = True
        if hasattr(self, "_file"):  # the draft could be opened
            self._file.close()


def _raise_listing_error(error: OSError) -> None:
    """Raise what went wrong while a folder was listed. Only a folder that is not there is empty: a
    sweep that takes an unreadable folder for an empty one deletes what others still need.
    """
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _new_draft(path: Path) -> Path:
    """The name of a new draft of a file, in a folder that is made if it is not there."""
    _make_folder(path.parent)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, each synced into the one that has its name."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_path(folder.parent)


def _link_without_overwriting(draft: Path, path: Path) -> None:
    """Give a draft its final name; `FileExistsError` if the name is taken."""
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        _rename_without_overwriting(draft, path)


def _rename_without_overwriting(draft: Path, path: Path) -> None:
    """The same on a disk without hard links, by a rename that refuses to overwrite: Python has none,
    but Linux does. Taking the name first, by an empty file, would leave that file if the process
    were killed in between.
    """
    current_folder = -100  # AT_FDCWD
    no_replace = 1  # RENAME_NOREPLACE
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if rename is not None:
        names = (os.fsencode(draft), os.fsencode(path))
        if rename(current_folder, names[0], current_folder, names[1], no_replace) == 0:
            return
        code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(draft), None, str(path))
    raise ConfigError(
        f"the disk of {path.parent} has neither hard links nor a rename that does not overwrite:"
        " two runs could overwrite each other's files there",
        next="give the stream an output path on another disk",
    )


def _sync_file(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _newest_versions(log: Path) -> list[int]:
    commit_files = [name for name in _names_in(log) if COMMIT_FILE_NAME.fullmatch(name)]
    newest = commit_files[-UNSYNCED_COMMITS_MAX:]
    return [int(name.removesuffix(".json")) for name in newest]
