"""The commit rule: an entry reaches the ledger by compare-and-set, or not at all.

When a commit is not confirmed, the ledger is read again:
- Our manifest is on it: only the answer was lost. The commit succeeded.
- Entries of other runs are on it: our entry is built again on top of them if its requirements still
  hold. Otherwise it is fenced.
- Nothing new is on it: the same commit is tried again, a few times. Then it is a platform error.

Next: ledger/entries.py has the requirements, ledger/delta_store.py the store.
"""

from __future__ import annotations

from typing import cast

from msgspec.structs import replace

from seriatim.engine.crash_points import crash_point
from seriatim.engine.records import MAIN_TABLE, table_of_path
from seriatim.errors import (
    ConfigError,
    FencedError,
    IntegrityError,
    PlatformError,
    raise_broken_promise,
)
from seriatim.ledger.entries import AnyEntry, Entry, StartEntry, apply_entry
from seriatim.ledger.manifests import LedgerHead, Manifest
from seriatim.ledger.model import Change, Ledger
from seriatim.ports import Clock, CommitConflictError, LedgerStore

TRIES_MAX = 5


def read_head(store: LedgerStore, stream: str) -> LedgerHead | None:
    """The head of the ledger, checked against its witness. None if the stream has no ledger yet.

    A ledger that went back or vanished since the witness was written is refused.
    """
    # The witness is read first. A commit in between then only moves the ledger ahead of the
    # witness, which is allowed; the other order would look like a ledger that went back.
    witness = store.witness()
    head = store.head(stream)
    if witness is None:
        return head
    sequence = witness.sequence
    if head is None:
        raise _witness_error(stream, f"there is no ledger, but head.json has seen entry {sequence}")
    head.witness = witness
    ledger = head.ledger
    if ledger.sequence < sequence:
        raise _witness_error(
            stream,
            f"the ledger ends at entry {ledger.sequence}, but head.json has seen entry {sequence}",
        )
    if ledger.sha256 == witness.sha256:
        return head
    is_ahead = ledger.sequence > sequence
    if not is_ahead or not store.has_manifest(witness.sha256, sequence - 1):
        raise _witness_error(stream, f"entry {sequence} is another one than head.json has seen")
    return head


def require_head(store: LedgerStore, stream: str) -> LedgerHead:
    """The head of the ledger. A stream that was never run has none and is refused."""
    head = read_head(store, stream)
    if head is None:
        raise never_run_error(stream)
    return head


def never_run_error(stream: str, consequence: str = "") -> ConfigError:
    """The error of a command that needs the ledger of a stream that was never run. `consequence` is
    what the command cannot do.
    """
    message = f"{stream}: it was never run"
    if consequence:
        message += f", so {consequence}"
    return ConfigError(message, next=f"seriatim run {stream}")


def read_head_again(store: LedgerStore, stream: str) -> LedgerHead:
    """The head of a ledger that was there a moment ago."""
    return read_head(store, stream) or raise_broken_promise("the ledger vanished in between")


def frontier_moved_error(stream: str, found: str, next_step: str) -> FencedError:
    """The error of a run that another one overtook."""
    return FencedError(
        f"{stream}: another run moved the frontier while this one was folding",
        found=found,
        next=next_step,
    )


def _witness_error(stream: str, contradiction: str) -> IntegrityError:
    return IntegrityError(
        f"{stream}: {contradiction}",
        cause="the records table was rolled back, deleted or replaced; going on would fold messages"
        " twice or lose them",
        next="restore records/ and manifests/ as they were when head.json was written."
        " If the older ledger is meant\n"
        f'(a deliberate restore): seriatim accept {stream} --restored --because "…"',
    )


def start_ledger(
    store: LedgerStore,
    clock: Clock,
    stream: str,
    attempt: str,
    changes: tuple[Change, ...],
) -> LedgerHead:
    """Create the ledger by committing its entry 0, and return its head.

    If another run created it at the same time, the head of that one is returned.
    """
    entry = StartEntry(
        attempt=attempt,
        changes=changes,
    )
    empty_head = LedgerHead(Ledger(stream=stream))
    try:
        head, _ = commit(store, clock, empty_head, entry)
        return head
    except FencedError:
        existing_head = read_head(store, stream)
        if existing_head is None:
            raise
        return existing_head


def commit(
    store: LedgerStore,
    clock: Clock,
    head: LedgerHead,
    entry: AnyEntry,
) -> tuple[LedgerHead, AnyEntry]:
    """Commit an entry on the ledger. Returns the head that has it, and the entry as committed.

    1. Build the entry on top of the head, or raise `FencedError` if its requirements do not hold.
    2. Write its manifest.
    3. Commit by compare-and-set on exactly this head.
    4. If that was not confirmed, read the ledger again: our manifest there means success, anything
       else means another try from step 1 on the head as it is now.
    5. Write the witness.
    """
    # Once, and not per try: a retry is the same entry, with the same manifest and hash.
    entry = replace(entry, at_seconds=clock.now_seconds())
    last_conflict = ""
    for attempt in range(TRIES_MAX):
        # 1. The entry on top of the head.
        entry_for_head = _entry_for_head(store, entry, head)
        manifest = build_manifest(entry_for_head, head.ledger)
        # It is the entry that was given, with its place in the ledger, so it has the same type.
        committed_entry = cast("AnyEntry", manifest.entry)
        # 2. The manifest. One that no commit ever names is swept later.
        reference = store.put_manifest(manifest)
        crash_point("manifest-written")
        # A ledger without entries is not there yet: then the commit creates the table, or loses
        # against another run that does.
        expected_head = head if head.ledger.sequence >= 0 else None
        try:
            # 3. Compare and set.
            store.compare_and_set(expected_head, manifest.entry, reference)
        except CommitConflictError as conflict:
            # 4. Not confirmed, which is not the same as not done: the answer may have got lost.
            head_now = store.head(head.ledger.stream)
            if store.has_manifest(reference.sha256, head.ledger.sequence):
                return _write_witness(store, head_now or head), committed_entry
            if head_now is not None:
                head = head_now
            clock.sleep(0.05 * 2**attempt)
            last_conflict = str(conflict)
            continue
        # 5. The witness.
        # Another run may have gone on from our entry meanwhile: then its head is as good.
        committed_head = store.head(head.ledger.stream) or head
        return _write_witness(store, committed_head), committed_entry
    raise PlatformError(
        f"{head.ledger.stream}: the commit was refused {TRIES_MAX} times and nobody else's is there",
        cause=last_conflict[:400],
        next="check that the output path can be written and has room, then run again",
    )


def catch_up_witness(store: LedgerStore, head: LedgerHead) -> None:
    """Write the witness again if it is behind the ledger.

    A run that died right after its commit leaves it behind, and a ledger that is lost afterwards
    would not be missed. `head` is what `read_head` returned.
    """
    if head.witness != head.ledger.mark:
        store.put_witness(head.ledger.mark)


def _write_witness(store: LedgerStore, head: LedgerHead) -> LedgerHead:
    """Write the witness after the commit. A crash before it leaves the ledger ahead of the witness,
    which is allowed.
    """
    crash_point("committed")
    store.put_witness(head.ledger.mark)
    head.witness = head.ledger.mark
    crash_point("witness-written")
    return head


def _entry_for_head(store: LedgerStore, proposed: Entry, head: LedgerHead) -> Entry:
    """The entry as this head can take it: without partitions that are held by a repair, and with
    findings about what others did to the table. `FencedError` if its requirements do not hold.
    """
    ledger = head.ledger
    entry = proposed.without_held_partitions(ledger)
    unmet = entry.unmet_requirements(ledger)
    removed = {path for path in entry.removed_paths if table_of_path(path) == MAIN_TABLE}
    if removed:
        replaced_by_others = sorted(removed - store.active_paths(head))
        if replaced_by_others:
            unmet.append(f"{replaced_by_others[0]} was replaced by another run")
    nothing_remains = bool(proposed.changes) and not entry.changes
    if unmet or nothing_remains:
        raise frontier_moved_error(
            ledger.stream,
            "; ".join(unmet[:5]) or "all its partitions are held",
            "nothing was written by this run; run again to go on from where the other one is",
        )
    return replace(entry, findings=(*entry.findings, *head.foreign_findings))


def build_manifest(entry: Entry, ledger: Ledger) -> Manifest:
    """An entry on top of a ledger, and the ledger after it."""
    entry = replace(entry, sequence=ledger.sequence + 1, previous=ledger.sha256)
    return Manifest(entry=entry, ledger=apply_entry(entry, ledger))
