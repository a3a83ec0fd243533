"""Verify: a stream's output looked at anew, independent of what any run remembered. Changes nothing but its sign-off.

1. the Delta log: every commit, the chain of entries, the witness, what was signed off before
2. the table: its files are those that entries added and did not remove, and readers see the same
3. the entries since the sign-off: each manifest by its hash, the ledger it makes, certificates that join
4. their files, and the state files of now: size, digest, page checksums, rows, order, counts
5. records folded to state, where the machine says how
6. files that nobody names: told, never damage
7. Kafka, if asked: the ranges it still has, by their digests
8. the sign-off, after a clean pass alone

Next room: core/chain.py and core/verify.py have the rules; steps/compare.py is step 7; cli/verify.py shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.core.chain import (
    Commit,
    Sign,
    active_files,
    chained,
    expected_files,
    follows,
    rewritten,
    same_entry,
    same_table,
    witnessed,
)
from seriatim.core.difference import REPAIR, RESTORE, RESTORE_LOG, Difference, Differs
from seriatim.core.errors import ConfigError, SeriatimError
from seriatim.core.ledger import Change, File, Ledger, Manifest, decode
from seriatim.core.machine import Runner, UserMachine
from seriatim.core.offsets import Partition
from seriatim.core.outputs import MAIN, table_in, table_of
from seriatim.core.table import TableMachine
from seriatim.core.verify import (
    Known,
    Outline,
    Rows,
    SignOff,
    beside,
    content_differs,
    counts_differ,
    file_differs,
    orphans,
    overlaps,
    plain,
    same_outputs,
    signed_off,
    state_differs,
)
from seriatim.ports import Audit, Unreadable

Progress = Callable[[int, int], None]
ORPHANS_TOLD_MAX = 20


class Table(Struct, frozen=True):
    """A machine, as far as folding its records needs it."""

    key: tuple[str, ...]
    columns: tuple[str, ...]
    load: Callable[[bytes, int], Mapping[Any, tuple[Any, ...]]]
    """The rows of a saved state, by key."""
    gone: Mapping[str, Any] = field(default_factory=lambda: {"op": "delete"})
    """A record with these values takes its row away."""
    is_own: bool = False
    """A machine of the user's: `load` gives what its `end` would take back, which may be more rows than there are."""


def foldable(runner: Runner) -> Table | None:
    """How a machine's records fold to its state; None: it does not say.

    Of the stock machine's state all rows are known. What a user's state holds is known only by `end`, which takes
    every row back: so its record must have a `row_key` and a `row_gone`.
    """
    keyed = runner.keyed
    if keyed is None:
        return None
    if isinstance(runner, TableMachine):
        return Table(keyed.key, keyed.columns, runner.load)
    if not isinstance(runner, UserMachine) or not runner.has_end or not keyed.gone:
        return None
    positions = [list(runner.columns).index(column) for column in keyed.key]

    def rows_to_take_back(saved: bytes, version: int) -> dict[Any, tuple[Any, ...]]:
        records = runner.end(runner.load(saved, version))
        rows = [plain(record) for record in records if table_of(record) == MAIN]
        if len(positions) == 1:
            return {row[positions[0]]: row for row in rows}
        return {tuple(row[position] for position in positions): row for row in rows}

    return Table(keyed.key, keyed.columns, rows_to_take_back, gone=keyed.gone, is_own=True)


class Verified(Struct, kw_only=True):
    """What was looked at, and what was found."""

    sequence: int = -1
    since: int = -1
    """Up to which entry an earlier pass had signed off."""
    entries: int = 0
    files: int = 0
    bytes: int = 0
    records: int = 0
    """Of the files that are in the table `records` now; those of files that were replaced are none of it."""
    sessions: int = 0
    gone: int = 0
    """Files that left the table, or state that was replaced, and that are deleted since: no damage."""
    orphans: int = 0
    compared: int = 0
    """Messages that were read again from Kafka."""
    folded: bool = False
    notes: list[str] = field(default_factory=list)
    warnings: list[Difference] = field(default_factory=list)
    difference: Difference | None = None


class Verifying:
    """One pass over one stream."""

    def __init__(
        self,
        stream: str,
        audit: Audit,
        *,
        table: Table | None = None,
        everything: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.stream, self.audit, self.table, self.everything = stream, audit, table, everything
        self.progress = progress or (lambda _done, _total: None)
        self.done = Verified()
        self.commits: list[Commit] = []
        self.signs: dict[int, Sign] = {}
        self.kept, self.kafka_signed = SignOff(), -1
        self.head = self.before = Ledger(stream=stream)
        self.entries: list[Manifest] = []
        """Those since the sign-off."""
        self.known: dict[str, Known] = {}
        """Files that they name, in order."""
        self.outlines: dict[str, Outline] = {}
        self.active: set[str] = set()

    def run(self, after: Callable[[Verifying], None] | None = None) -> Verified:
        """All of it, up to the first difference. `after` is asked before the sign-off: it may raise `Differs`."""
        try:
            self.open_log()
            self._table()
            self._entries()
            self._files()
            self._fold()
            self._orphans()
            if after is not None:
                after(self)
        except Differs as differs:
            self.done.difference = differs.difference
            self.audit.put_differs(differs.difference.file)
            return self.done
        self.audit.put_differs("")
        self._sign_off()
        return self.done

    def take(self, differences: Iterable[Difference]) -> None:
        """Warnings are kept, the first error ends it."""
        for difference in differences:
            if difference.level == "error":
                raise Differs(difference)
            self.done.warnings.append(difference)

    def open_log(self) -> None:
        """Step 1. The log comes last: a run that commits meanwhile only moves it ahead, which is fine."""
        witness, content, self.others = self.audit.witness(), self.audit.signed(), self.audit.others()
        self.commits = self.audit.commits()
        self.signs = {commit.sign.sequence: commit.sign for commit in self.commits if commit.sign}
        if not self.commits and witness is None:
            raise ConfigError(f"{self.stream}: it was never run", next=f"seriatim run {self.stream}")
        self.take(chained(self.commits))
        self.take(witnessed(witness, self.signs))
        if content is None:
            return
        kept = SignOff.opened(content)
        if kept is None:
            told = "everything is looked at again; a clean pass writes it anew"
            self.take([Difference(what="the sign-off was changed", file="verified.json", level="warning", next=told)])
            return
        changed = list(signed_off(kept, {commit.version: commit for commit in self.commits}, self.signs))
        self.take(replace(one, level="warning") if self.everything else one for one in changed)
        self.kafka_signed = -1 if changed else kept.kafka
        if not self.everything:
            self.kept = kept

    def _table(self) -> None:
        """Step 2."""
        expected, self.active = expected_files(self.commits), active_files(self.commits)
        try:
            readers = self.audit.readers_see(self.commits[-1].version)
        except Unreadable as trouble:
            where = "records/_delta_log"
            self.take([Difference(what="readers cannot open the table", file=where, found=str(trouble), next=RESTORE)])
        self.take(same_table(expected, self.active, readers))
        self.take(rewritten(self.commits))
        for path, added in expected.items():
            size = self.audit.size(path)
            if size != added.size:
                what = "a file is missing" if size is None else "a file has another size"
                found = "" if size is None else f"{size} bytes"
                self.take([Difference(what=what, file=path, expected=f"{added.size} bytes", found=found, next=REPAIR)])

    def _entries(self) -> None:
        """Step 3. Where files were replaced since the sign-off, or its state is gone, everything is looked at."""
        last = max(self.signs, default=-1)
        self._read_since(self.kept.sequence)
        if self.kept.sequence >= 0 and (any(m.entry.removed for m in self.entries) or not self._has_state(self.before)):
            self.done.notes.append("files were replaced since the sign-off, so everything is looked at again")
            self.kept = replace(self.kept, sequence=-1)
            self._read_since(-1)
        self.head = self.entries[-1].ledger if self.entries else self.before
        self.done.sequence, self.done.since, self.done.entries = last, self.kept.sequence, len(self.entries)

    def _read_since(self, signed: int) -> None:
        self.entries, self.known = [], {}
        self.before = before = self.manifest(signed).ledger if signed >= 0 else Ledger(stream=self.stream)
        by_sequence = {commit.sign.sequence: commit for commit in self.commits if commit.sign}
        for sequence in range(signed + 1, max(self.signs, default=-1) + 1):
            manifest, commit = self.manifest(sequence), by_sequence[sequence]
            self.take(same_entry(self.signs[sequence], commit, manifest, self.stream))
            self.take(follows(manifest, before))
            self.entries.append(manifest)
            before = manifest.ledger
            for change in manifest.entry.changes:
                for file in change.files():
                    self.known.setdefault(file.path, Known(file, sequence, change))

    def manifest(self, sequence: int) -> Manifest:
        """An entry's manifest, proved by the hash that the chain has."""
        sign = self.signs[sequence]

        def damaged(what: str, expected: str, found: str) -> Differs:
            return Differs(
                Difference(
                    what=what, file=sign.manifest, sequence=sequence, expected=expected, found=found, next=RESTORE
                )
            )

        try:
            sha256, content = self.audit.manifest(sign.manifest)
        except Unreadable as trouble:
            raise damaged("a manifest cannot be read", "", str(trouble)) from None
        if sha256 != sign.sha256:
            raise damaged("a manifest is damaged", sign.sha256, sha256)
        try:
            return decode(content)
        except ConfigError:
            raise
        except (msgspec.MsgspecError, SeriatimError) as error:
            raise damaged("a manifest cannot be read", "", str(error)) from None

    def _has_state(self, ledger: Ledger) -> bool:
        files = [file for account in ledger.partitions.values() for file in account.state]
        return all(self.audit.size(file.path) == file.bytes for file in files)

    def _files(self) -> None:
        """Step 4."""
        wanted, current = dict(self.known), set()
        for place, account in self.head.partitions.items():
            for file in account.state:
                current.add(file.path)
                wanted.setdefault(file.path, Known(file, self.head.sequence, _nothing(place, file)))
        twins = {known.file.digest: path for path, known in wanted.items()}
        total, kinds = sum(known.file.bytes for known in wanted.values()), self._kinds()
        current |= beside(self.entries, self.head.sequence)
        for path, known in wanted.items():
            needed = path in self.active or path in current or path.startswith("kept/")
            self._file(known, twins, kinds.get(known.sequence, ""), needed=needed)
            self.progress(self.done.bytes, total)
        current |= self.active
        active = [(self.known[path], one) for path, one in self.outlines.items() if path in current]
        for table in {table_in(known.file.path) for known, _ in active}:
            self.take(overlaps((known, one) for known, one in active if table_in(known.file.path) == table))
        if self.kept.sequence < 0:
            self.take(same_outputs(self.others, self.entries))

    def _kinds(self) -> dict[int, str]:
        return {manifest.entry.sequence: manifest.entry.kind for manifest in self.entries}

    def _file(self, known: Known, twins: Mapping[str, str], kind: str, *, needed: bool) -> None:
        path, size = known.file.path, self.audit.size(known.file.path)
        self.done.bytes += known.file.bytes
        if size is None and not needed:
            self.done.gone += 1
            return
        self.take(file_differs(known, size, "" if size is None else self.audit.digest(path), twins))
        self.done.files += 1
        in_slice = kind in ("start", "slice")
        try:
            if path.startswith("state/"):
                self._state_file(known, in_slice=in_slice)
                return
            outline = self.audit.outline(path)
        except Unreadable as trouble:
            where: dict[str, Any] = {"file": path, "sequence": known.sequence, "next": RESTORE}
            raise Differs(Difference(what="a file cannot be read", found=str(trouble), **where)) from None
        self.take(content_differs(known, outline, in_slice=in_slice, compacted=kind == "compact"))
        if path.startswith("records"):
            if in_slice:
                self.take(counts_differ(known, outline))
            self.outlines[path] = outline
            if path in self.active:
                self.done.records += outline.rows

    def _state_file(self, known: Known, *, in_slice: bool) -> None:
        change = known.change
        offsets = [row["last_offset"] for row in self.audit.rows(known.file.path, ["session", "last_offset"])]
        last = change.state is not None and bool(change.state) and change.state[-1].path == known.file.path
        touched = sum(change.frontier <= offset < change.until for offset in offsets)
        if not (in_slice and last):
            known = replace(known, change=replace(change, certificate=None))
        self.take(state_differs(known, len(offsets), touched))

    def _fold(self) -> None:
        """Step 5: from the state that was signed off, or from nothing, through the records since."""
        lives = self._in_order()
        for place, account in self.head.partitions.items():
            sessions = self._sessions(account.state)
            self.done.sessions += len(sessions)
            waiting = sum(row["status"] == "quarantined" for row in sessions.values())
            if waiting != account.quarantined:
                self.take([_miscounted(place, account.quarantined, waiting)])
            if self.table is None or rewritten_files(self.commits):
                continue
            before = self.before.partitions.get(place)
            rows = Rows(place, self.table.columns)
            if not self.table.is_own:
                for name, table in self._tables(place, self._sessions(before.state if before else ())):
                    for key, row in table.items():
                        rows.take(name, key, row, -1)
            for path in lives.get(place, ()):
                last_rows = self.audit.last_rows(path, self.table.key, self.table.columns, self.table.gone)
                for session, key, new, offset in last_rows:
                    rows.take(session, key, new, offset)
            states = dict(self._tables(place, sessions))
            self.take(rows.lacking(states) if self.table.is_own else rows.differ(states))
        self._say_folded()

    def _say_folded(self) -> None:
        others = rewritten_files(self.commits)
        self.done.folded = self.table is not None and not others
        if self.table is None:
            self.done.notes.append(
                "records were not folded to state: the machine does not say how, by row_key, row_gone and an `end`"
            )
        elif others:
            self.done.notes.append(
                f"records were not folded to state: {len(others)} files were rewritten by somebody else (OPTIMIZE)"
            )

    def _in_order(self) -> dict[str, list[str]]:
        """Active record files that were looked at, by partition: life after life of the topic, by offset."""
        ids = [(place, account.topic_id) for place, account in self.before.partitions.items()]
        ids += [(str(change.partition), change.topic_id) for one in self.entries for change in one.entry.changes]
        lives = {life: number for number, life in enumerate(dict.fromkeys(ids))}
        ordered: dict[str, list[tuple[int, int, str]]] = {}
        for path, outline in self.outlines.items():
            place = str(self.known[path].change.partition)
            life = [lives.get((place, topic_id), len(lives)) for topic_id in outline.topic_ids]
            if path in self.active:
                ordered.setdefault(place, []).append((max(life), outline.first, path))
        return {place: [path for _, _, path in sorted(files)] for place, files in ordered.items()}

    def _sessions(self, files: Iterable[File]) -> dict[str, dict[str, Any]]:
        """Sessions of state files, each from the newest that has it."""
        wanted = ["session", "state", "state_version", "status"]
        return {row["session"]: row for file in files for row in self.audit.rows(file.path, wanted)}

    def _tables(
        self, place: str, sessions: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[str, Mapping[Any, tuple[Any, ...]]]]:
        for name, row in sessions.items():
            try:
                if self.table is not None and row["state"] is not None:
                    yield name, self.table.load(row["state"], row["state_version"])
            except Exception as error:
                # A user's `upgrade` or `end` may raise anything. Of our own code only what msgspec says is expected.
                if not (isinstance(error, msgspec.MsgspecError) or (self.table is not None and self.table.is_own)):
                    raise
                where: dict[str, Any] = {"partition": place, "session": name, "found": str(error)}
                told = "check that the stream file has the columns and the key it had when it was run"
                raise Differs(Difference(what="a session's state cannot be read", next=told, **where)) from None

    def _orphans(self) -> None:
        """Step 6."""
        signed = self.before if self.kept.sequence >= 0 else None
        named = {sign.manifest for sign in self.signs.values()} | set(self.known) | self.active
        named |= {added.path for commit in self.commits for added in commit.adds}
        named |= {file.path for account in self.head.partitions.values() for file in account.state}
        found = list(orphans(self.audit.paths(), named, self.head, signed))
        self.done.orphans = len(found)
        what = "a file that nobody names"
        self.take(Difference(what=what, file=path, next=why, level="warning") for path, why in found[:ORPHANS_TOLD_MAX])
        if len(found) > ORPHANS_TOLD_MAX:
            self.done.notes.append(f"{len(found) - ORPHANS_TOLD_MAX} more files that nobody names")

    def _sign_off(self) -> None:
        """Step 8."""
        last = next(commit for commit in reversed(self.commits) if commit.sign)
        sign = last.sign
        if sign is None:
            return
        signed = SignOff(
            sequence=sign.sequence, sha256=sign.sha256, version=last.version, log=last.log, kafka=self.kafka_signed
        )
        self.audit.put_signed(signed.sealed())


def rewritten_files(commits: Iterable[Commit]) -> list[str]:
    """Active files that no entry added, but somebody's rewriting of the table."""
    commits = list(commits)
    ours = {added.path for commit in commits if commit.sign for added in commit.adds}
    return sorted(set(expected_files(commits)) - ours)


def _nothing(place: str, file: File) -> Change:
    """Stands in for the change that named a file before the sign-off."""
    return Change(partition=Partition.parse(place), epoch=0, frontier=0, until=0, topic_id="", born=0, state=(file,))


def _miscounted(place: str, said: int, found: int) -> Difference:
    return Difference(
        what="the ledger counts other sessions in quarantine than the state has",
        partition=place,
        expected=str(said),
        found=str(found),
        next=RESTORE_LOG,
    )
