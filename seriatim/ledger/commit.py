"""Commit: compare-and-set, or nothing. The one rule by which entries reach the ledger.

When a commit is not confirmed the ledger is read again. Our manifest is there: the answer got lost,
success. Others are there: the entry is built again on top of them if its requirements hold, else it
is fenced. Nobody is there: the same again, a few times, then it is platform trouble.

Next room: ledger/model.py for the requirements, ledger/delta_store.py for the store.
"""

from __future__ import annotations

from msgspec.structs import replace

from seriatim.engine.crash_points import crash_point
from seriatim.engine.record_kinds import MAIN_TABLE, table_of_path
from seriatim.errors import FencedError, IntegrityError, PlatformError
from seriatim.ledger.model import Change, Entry, Ledger, Manifest, apply_entry, encode_manifest
from seriatim.ledger.requirements import unmet_requirements, without_held
from seriatim.ports import Clock, CommitConflictError, LedgerHead, LedgerStore

TRIES_MAX = 5


def read_head(store: LedgerStore, stream: str) -> LedgerHead | None:
    """The ledger, checked against its witness: a ledger that went back or vanished is refused."""
    witness = (
        store.witness()
    )  # first: whoever commits in between moves the ledger ahead of it, which is fine
    head = store.head(stream)
    if witness is None:
        return head
    sequence, sha256 = witness
    if head is None:
        raise _witness_error(stream, f"there is no ledger, but head.json has seen entry {sequence}")
    ledger = head.ledger
    if ledger.sequence < sequence:
        raise _witness_error(
            stream,
            f"the ledger ends at entry {ledger.sequence}, but head.json has seen entry {sequence}",
        )
    if ledger.sha256 != sha256 and not (
        ledger.sequence > sequence and store.has_manifest(sha256, sequence - 1)
    ):
        raise _witness_error(stream, f"entry {sequence} is another one than head.json has seen")
    return head


def _witness_error(stream: str, contradiction: str) -> IntegrityError:
    return IntegrityError(
        f"{stream}: {contradiction}",
        cause="the records table was rolled back, deleted or replaced; going on would fold messages twice or lose them",
        next="restore records/ and manifests/ as they were when head.json was written. If the older ledger is meant\n"
        f'(a deliberate restore): seriatim accept {stream} --restored --because "…"',
    )


def start_ledger(
    store: LedgerStore, clock: Clock, stream: str, attempt: str, changes: tuple[Change, ...]
) -> LedgerHead:
    """Make the ledger by its entry 0. Whoever comes second takes the first one's."""
    entry = Entry(kind="start", attempt=attempt, changes=changes)
    try:
        return commit(store, clock, LedgerHead(Ledger(stream=stream)), entry)[0]
    except FencedError:
        head = read_head(store, stream)
        if head is None:
            raise
        return head


def commit(
    store: LedgerStore, clock: Clock, head: LedgerHead, entry: Entry
) -> tuple[LedgerHead, Entry]:
    """Put an entry on the ledger, by the rule above. The head that has it, and the entry as
    committed.
    """
    entry = replace(entry, at_seconds=clock.now_seconds())
    for attempt in range(TRIES_MAX):
        after, manifest = build_manifest(_entry_for_head(store, entry, head), head.ledger)
        path, sha256 = store.put_manifest(after.sequence, encode_manifest(manifest))
        crash_point("manifest-written")
        try:
            store.compare_and_set(
                None if head.ledger.sequence < 0 else head, manifest.entry, path, sha256
            )
        except CommitConflictError as conflict:
            found = store.head(stream_of_head(head))
            if store.has_manifest(sha256, head.ledger.sequence):
                return _write_witness(store, found or head), manifest.entry
            if found is not None:
                head = found
            clock.sleep(0.05 * 2**attempt)
            trouble = conflict
            continue
        return _write_witness(store, store.head(stream_of_head(head)) or head), manifest.entry
    raise PlatformError(
        f"{head.ledger.stream}: the commit was refused {TRIES_MAX} times and nobody else's is there",
        cause=str(trouble)[:400],
        next="check that the output path can be written and has room, then run again",
    )


def stream_of_head(head: LedgerHead) -> str:
    """The stream whose ledger this is."""
    return head.ledger.stream


def catch_up_witness(store: LedgerStore, head: LedgerHead) -> None:
    """A run that died right after its commit left the witness behind: a ledger lost now would not
    be missed.
    """
    seen = (head.ledger.sequence, head.ledger.sha256)
    if store.witness() != seen:
        store.put_witness(*seen)


def _write_witness(store: LedgerStore, head: LedgerHead) -> LedgerHead:
    """After the commit: the witness. A crash before it leaves the ledger ahead, which is fine."""
    crash_point("committed")
    store.put_witness(head.ledger.sequence, head.ledger.sha256)
    crash_point("witness-written")
    return head


def _entry_for_head(store: LedgerStore, proposed: Entry, head: LedgerHead) -> Entry:
    """The entry as this head takes it: without what is held, and telling what others did to the
    data.
    """
    ledger = head.ledger
    entry = without_held(proposed, ledger)
    broken = unmet_requirements(entry, ledger)
    removed = {path for path in entry.removed_paths if table_of_path(path) == MAIN_TABLE}
    if removed and (gone := sorted(removed - store.active_paths(head))):
        broken.append(f"{gone[0]} was replaced by another run")
    if broken or (proposed.changes and not entry.changes):
        raise FencedError(
            f"{ledger.stream}: another run moved the frontier while this one was folding",
            found="; ".join(broken[:5]) or "all its partitions are held",
            next="nothing was written by this run; run again to go on from where the other one is",
        )
    return replace(entry, findings=(*entry.findings, *head.foreign_findings))


def build_manifest(entry: Entry, ledger: Ledger) -> tuple[Ledger, Manifest]:
    """The ledger after an entry, and the manifest that says so."""
    entry = replace(entry, sequence=ledger.sequence + 1, previous=ledger.sha256)
    after = apply_entry(entry, ledger)
    return after, Manifest(entry=entry, ledger=after)
