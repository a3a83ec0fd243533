"""Find the damage in a stream: what has to be folded again, partition by partition.

Damage is one of these: a file that is not as committed, a session in quarantine, a range whose
check failed, a log that was cut. What a person names in a request counts as damage too. This
module only reads. What can be done about the damage is decided elsewhere.

Next: operations/repair/planner.py turns damage into the actions of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from seriatim.engine.files import File
from seriatim.engine.offsets import Bounds, Partition
from seriatim.engine.session import Session
from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.history import FileOrigin, PartitionHistory
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Account, Ledger
from seriatim.operations.repair.plan import Damage, RepairRequest
from seriatim.operations.repair.refold_rules import RefoldRequest
from seriatim.ports import OpenStream

SESSIONS_NAMED_MAX = 5
PARTITIONS_NAMED_MAX = 20


def require_known_partition(ledger: Ledger, name: str) -> Partition:
    """The partition of this name. A partition that was never read is refused."""
    partition = Partition.parse(name)
    if ledger.account(partition) is None:
        known_partitions = ledger.known_partitions()[:PARTITIONS_NAMED_MAX]
        raise ConfigError(
            f"{ledger.stream}: {partition} was never read",
            known=", ".join(map(str, known_partitions)),
            next="name one of these partitions",
        )
    return partition


class DamageSearch:
    """Looks for the damage in one stream, as of one entry of its ledger."""

    def __init__(
        self,
        open_stream: OpenStream,
        head: LedgerHead,
        bounds: Mapping[Partition, Bounds],
        histories: Mapping[Partition, PartitionHistory],
        suspects: frozenset[str] = frozenset(),
    ) -> None:
        self.open_stream = open_stream
        self.stream = open_stream.stream
        self.head = head
        self.ledger = head.ledger
        self.bounds = bounds
        self.histories = histories
        self.suspects = suspects
        """Paths of files that an earlier attempt at this repair could not read."""

    def account(self, partition: Partition) -> Account:
        """The account of a partition that the ledger knows."""
        return self.ledger.partitions[str(partition)]

    # The request of a person

    def partitions_of_request(self, request: RepairRequest) -> list[Partition]:
        """The partitions that a request is about. A partition that was never read is refused."""
        if not request.partition:
            known_partitions = self.ledger.known_partitions()
            return [p for p in known_partitions if not self.account(p).retired]
        return [require_known_partition(self.ledger, request.partition)]

    def damages_by_partition(self, request: RepairRequest) -> Iterator[list[Damage]]:
        """What has to be folded again: one list for each partition that has any damage.

        A range that a person named is widened by the suspect files in its partition. If nothing
        was named, the partitions of the request are searched.
        """
        named_refolds = self._refolds_of_request(request)
        for refold in named_refolds:
            suspect_files = self._damaged_record_files(refold.partition, self.suspects)
            yield [Damage(request=refold), *suspect_files]
        if named_refolds:
            return
        # A digest means reading the whole file: that is done only where a person named the
        # partition. Otherwise the size of a file has to do, except for suspect files.
        check_digests = bool(request.partition)
        for partition in self.partitions_of_request(request):
            damages = self._damages_of_partition(partition, check_digests=check_digests)
            if damages:
                yield damages

    def _refolds_of_request(self, request: RepairRequest) -> list[RefoldRequest]:
        """The ranges that a person named: of a backfill, of a session, or from an offset on."""
        refolds: list[RefoldRequest] = []
        for partition_name, (start, until) in sorted(request.ranges.items()):
            partition = Partition.parse(partition_name)
            refolds.append(
                RefoldRequest(partition=partition, start=start, until=until, reason="backfill")
            )
        if request.start is not None or request.session is not None:
            refolds.append(self._refold_of_named_session_or_offset(request))
        return refolds

    def _refold_of_named_session_or_offset(self, request: RepairRequest) -> RefoldRequest:
        """The refold of a session, or of a partition from an offset on, up to the frontier."""
        partition = self._partition_of_named_session_or_offset(request)
        account = self.account(partition)
        start = request.start
        sessions = None
        if request.session is not None:
            sessions = (request.session,)
            session = self._load_session(partition, request.session)
            if start is None:
                start = _damage_offset_of_session(session)
        if start is None:
            raise ConfigError(
                f"{self.stream.name}: nothing is known to be wrong with session {request.session!r}",
                next="say from which offset on it is to be folded again: --from OFFSET",
            )
        if not account.initial_frontier <= start < account.frontier:
            raise ConfigError(
                f"{self.stream.name}: --from {start} is not within what was folded of {partition}",
                allowed=f"{account.initial_frontier} to {account.frontier - 1}",
                next="choose an offset that was folded; `seriatim run` folds what comes after",
            )
        return RefoldRequest(
            partition=partition,
            start=start,
            until=account.frontier,
            sessions=sessions,
            reason=f"from offset {start} on, as asked",
        )

    def _load_session(self, partition: Partition, name: str) -> Session:
        """The state of a session in a partition. A session that is not there is refused."""
        state_files = self.account(partition).state
        session = self.open_stream.open_state().load(state_files, (name,)).get(name)
        if session is None:
            raise ConfigError(
                f"{self.stream.name}: there is no session {name!r} in {partition}",
                next=f"`seriatim state {self.stream.name} SESSION` looks for sessions",
            )
        return session

    def _partition_of_named_session_or_offset(self, request: RepairRequest) -> Partition:
        """The partition that was named, or the one in which the named session lives."""
        if request.partition:
            return self.partitions_of_request(request)[0]
        if request.session is None:
            raise ConfigError(
                f"{self.stream.name}: --from needs to know where",
                next="add --partition TOPIC/NUMBER, or --session NAME",
            )
        state = self.open_stream.open_state()
        homes = [
            partition
            for partition in self.ledger.known_partitions()
            if state.find_names(self.account(partition).state, [request.session])
        ]
        if not homes:
            raise ConfigError(
                f"{self.stream.name}: there is no session {request.session!r}",
                next=f"check the name; `seriatim status {self.stream.name}` lists the sessions in"
                " quarantine",
            )
        if len(homes) > 1:
            raise ConfigError(
                f"{self.stream.name}: session {request.session!r} lives in {len(homes)} partitions:"
                f" {', '.join(map(str, homes))}",
                next="say which with --partition TOPIC/NUMBER; `seriatim state` looks at sessions",
            )
        return homes[0]

    # The damage of one partition

    def _damages_of_partition(self, partition: Partition, *, check_digests: bool) -> list[Damage]:
        """All damage of a partition: its record files, its checks, its log, its state."""
        account = self.account(partition)
        damaged_state_files = self.open_stream.joiner.find_damaged_files(account.state)
        damages = self._damaged_record_files(
            partition, self._suspect_paths(), check_all_files=True, check_digests=check_digests
        )
        damages += self._failed_checks(partition)
        if self.is_log_cut(partition):
            damages.append(self._cut_log_damage(partition))
        if damaged_state_files:
            path, defect = next(iter(damaged_state_files.items()))
            reason = f"state file {path}: {defect}"
            frontier = account.frontier
            damages.append(
                _damage_of_range(partition, frontier, frontier, reason, rebuilds_state=True)
            )
        elif account.quarantined:
            # Only where the state is intact: which sessions are in quarantine stands in it.
            damages += self._quarantined_sessions(partition)
        return damages

    def _cut_log_damage(self, partition: Partition) -> Damage:
        """What was folded beyond the end of a log that was cut."""
        account = self.account(partition)
        end = min(self.bounds[partition].log_end, account.frontier)
        if account.halt is not None and account.halt.log_end >= 0:
            # Producers may have written again since the halt. What counts is where the cut was.
            end = min(self.bounds[partition].log_end, account.halt.log_end)
        reason = f"the log was cut at offset {end}"
        return _damage_of_range(partition, end, account.frontier, reason)

    def is_log_cut(self, partition: Partition) -> bool:
        """Whether the log ends before what was folded, or did when the partition halted."""
        account = self.account(partition)
        bounds = self.bounds.get(partition)
        if bounds is None or bounds.topic_id != account.topic_id:
            return False
        halted_by_cut = account.halt is not None and account.halt.finding == "truncated"
        return halted_by_cut or bounds.log_end < account.frontier

    def _quarantined_sessions(self, partition: Partition) -> list[Damage]:
        """The sessions in quarantine, as one damage: only they are folded again."""
        account = self.account(partition)
        sessions = self.open_stream.open_state().quarantined_sessions(account.state)
        if not sessions:
            return []
        names = sorted(sessions)
        listed = ", ".join(names[:SESSIONS_NAMED_MAX])
        if len(names) > SESSIONS_NAMED_MAX:
            listed += ", …"
        plural = "" if len(names) == 1 else "s"
        finding_offsets = [session.finding_offset for session in sessions.values()]
        refold = RefoldRequest(
            partition=partition,
            start=min(finding_offsets),
            until=account.frontier,
            sessions=tuple(names),
            reason=f"{len(names)} session{plural} in quarantine: {listed}",
        )
        return [Damage(request=refold, damaged_until=max(finding_offsets) + 1)]

    def _failed_checks(self, partition: Partition) -> list[Damage]:
        """The ranges whose check failed and that were not repaired yet."""
        account = self.account(partition)
        damages: list[Damage] = []
        for failed in self.ledger.failed_ranges:
            if failed.partition != str(partition):
                continue
            is_repaired = failed.replaced_by_sequence >= 0
            if is_repaired or failed.start >= account.frontier:
                continue
            reason = f"its check failed (verdict up to entry {failed.judged_until})"
            damages.append(_damage_of_range(partition, failed.start, failed.until, reason))
        return damages

    def _damaged_record_files(
        self,
        partition: Partition,
        suspects: Iterable[str],
        *,
        check_all_files: bool = False,
        check_digests: bool = False,
    ) -> list[Damage]:
        """The ranges of record files that are in a table and not as committed.

        Suspect files are always checked by their digest. All other files are checked only with
        `check_all_files`: by their digest with `check_digests`, else by their size.
        """
        joiner = self.open_stream.joiner
        origins = self._record_files_of_current_topic(partition)
        suspect_files = [origins[path].file for path in suspects if path in origins]
        damaged = joiner.find_damaged_files(suspect_files)
        if check_all_files:
            all_files = [origin.file for origin in origins.values()]
            damaged |= joiner.find_damaged_files(all_files, check_digests=check_digests)
        damages: list[Damage] = []
        for path, defect in sorted(damaged.items()):
            origin = origins[path]
            reason = f"record file {path}: {defect}"
            damages.append(_damage_of_range(partition, origin.start, origin.until, reason))
        return damages

    def _record_files_of_current_topic(self, partition: Partition) -> dict[str, FileOrigin]:
        """The partition's record files in all tables, without those of a topic that was deleted."""
        history = self.histories[partition]
        topic_id = self.account(partition).topic_id
        origins = self._active_record_files(history)
        origins += history.other_record_files.values()
        return {origin.file.path: origin for origin in origins if origin.topic_id == topic_id}

    def _active_record_files(self, history: PartitionHistory) -> list[FileOrigin]:
        """The record files of a partition that are in the table of records now."""
        return [
            history.record_files[path]
            for path in self._active_paths()
            if path in history.record_files
        ]

    def _active_paths(self) -> set[str]:
        return self.open_stream.ledger.active_paths(self.head)

    def _suspect_paths(self) -> set[str]:
        """Files that verify found to differ, or that a refold could not read."""
        return {*self.open_stream.ledger.differing_files(), *self.suspects}

    # Files that no refold can replace, and files that nothing needs

    def unrecoverable_file_notes(self) -> list[str]:
        """What to do about damaged files that Kafka cannot give back.

        Those are files of a partition that is retired, and of a topic that was deleted and
        created again.
        """
        notes: list[str] = []
        for partition, history in self.histories.items():
            account = self.account(partition)
            files = [
                origin.file
                for origin in self._active_record_files(history)
                if account.retired or origin.topic_id != account.topic_id
            ]
            cause = "it is of an earlier life of its topic"
            if account.retired:
                cause = "its partition is retired"
            damaged = self.open_stream.joiner.find_damaged_files(files, check_digests=False)
            for path, defect in damaged.items():
                error = IntegrityError(
                    f"{self.stream.name}: record file {path}: {defect}",
                    cause=cause,
                    next="restore this file from a backup",
                )
                notes.append(error.render())
        return notes

    def files_written_by_others(self) -> list[File]:
        """Files in the table that no entry of the ledger made."""
        known_paths: set[str] = set()
        for history in self.histories.values():
            known_paths.update(history.record_files)
        active_files = self.open_stream.ledger.active_files(self.head)
        return [file for file in active_files if file.path not in known_paths]

    def unneeded_damaged_files(self) -> list[str]:
        """Damaged files that verify found, that nothing needs any more, and that still exist."""
        needed_paths = set(self._active_paths())
        for account in self.ledger.partitions.values():
            needed_paths |= {file.path for file in account.state}
        committed_files = self._all_committed_files()
        candidates = [
            committed_files[path]
            for path in self._suspect_paths()
            if path in committed_files and path not in needed_paths
        ]
        if not candidates:
            return []
        # A file that is gone counts as damaged too, but there is nothing of it to delete.
        existing_paths: set[str] = set()
        for partition in self.histories:
            existing_paths.update(self.open_stream.records.paths(partition))
        existing_files = [file for file in candidates if file.path in existing_paths]
        return sorted(self.open_stream.joiner.find_damaged_files(existing_files))

    def _all_committed_files(self) -> dict[str, File]:
        """Every record file and state file that an entry of the ledger ever made, by path."""
        files: dict[str, File] = {}
        for history in self.histories.values():
            for path, origin in history.all_record_files.items():
                files[path] = origin.file
            for point in history.points:
                for file in point.change.state or ():
                    files[file.path] = file
        return files


def _damage_offset_of_session(session: Session) -> int | None:
    """The offset at which a session went wrong; None if nothing is known to be wrong with it."""
    offset = session.damaged_since_offset
    if session.finding is not None:
        offset = session.finding_offset
    if offset < 0:
        return None
    return offset


def _damage_of_range(
    partition: Partition, start: int, until: int, reason: str, *, rebuilds_state: bool = False
) -> Damage:
    return Damage(
        request=RefoldRequest(partition=partition, start=start, until=until, reason=reason),
        rebuilds_state=rebuilds_state,
    )
