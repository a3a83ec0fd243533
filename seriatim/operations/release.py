"""Release: a person takes a session out of quarantine, with its last good state; the next messages
apply again.

The messages that were set aside stay so: whoever releases says that the session is right without
them. Its sequence begins anew with its next message, which follows what nobody applied; a window
waits for that first. A session that is headless since messages were lost is released just so: then
none of them was its own.

Next room: ledger/model.py says what an accept requires; operations/accept.py is for topics.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.after_loss import is_in_doubt, needs_snapshot
from seriatim.engine.crash_points import crash_point
from seriatim.engine.findings import GapMark, Tier
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Counts, Session
from seriatim.engine.state_merging import merge_count
from seriatim.engine.task import stem_prefix
from seriatim.errors import ConfigError, FencedError, raise_broken_promise
from seriatim.ledger.commit import TRIES_MAX, commit
from seriatim.ledger.machine_version import refuse_incompatible_machine
from seriatim.ledger.model import (
    FINDINGS_ENDED_BY_ACCEPT,
    Account,
    Certificate,
    Change,
    File,
    Ledger,
)
from seriatim.operations.accept import DecisionContext, decision_entry, refuse_held, require_head


class SessionRelease(Struct, kw_only=True):
    """Who was released, or would be."""

    session: str
    partition: Partition
    finding: str
    offset: int
    """Of the message that hurt."""
    frontier: int
    """From here on its messages apply again."""
    reason: str
    sequence: int = -1
    """The entry that says so; -1: none was made."""


def release_session(
    context: DecisionContext,
    name: str,
    reason: str,
    topic: str | None = None,
    *,
    dry_run: bool = False,
) -> SessionRelease:
    """Release one session by hand."""
    for left in reversed(range(TRIES_MAX)):
        head = require_head(context.ledger, context.stream.name)
        runner = context.runner
        refuse_incompatible_machine(
            head.ledger, runner.name, runner.state_version, runner.can_upgrade, runner.shape
        )
        partition, session = _find_waiting_session(context, head.ledger, name, topic)
        account = head.ledger.account(partition) or raise_broken_promise(
            "a session lives in a known partition"
        )
        made = SessionRelease(
            session=name,
            partition=partition,
            finding=session.finding or "gap",
            offset=session.finding_offset if session.finding else session.damaged_since_offset,
            frontier=account.frontier,
            reason=reason,
        )
        if dry_run:
            return made
        attempt = context.new_attempt()
        change = _release_change(context, partition, account, made, session, attempt)
        entry = decision_entry("accept", attempt, [change], reason)
        try:
            made.sequence = commit(context.ledger, context.clock, head, entry)[1].sequence
        except FencedError:
            if not left:
                raise
            continue
        return made
    return raise_broken_promise("a release ends by a commit or an error")


def _find_waiting_session(
    context: DecisionContext, ledger: Ledger, name: str, topic: str | None
) -> tuple[Partition, Session]:
    """The one place where the session waits."""
    places = [
        place for place in ledger.known_partitions() if topic in (None, place.topic, str(place))
    ]
    found = []
    for place in places:
        account = ledger.partitions[str(place)]
        some = account.quarantined or account.headless_since >= 0
        session = context.state.load(account.state, [name]).get(name) if some else None
        if session is not None and (session.finding is not None or _is_headless(session, account)):
            found.append((place, session))
    if not found:
        where = f" in topic {topic}" if topic else ""
        raise ConfigError(
            f"{ledger.stream}: session {name!r} is not in quarantine{where}",
            next=f"`seriatim status {ledger.stream}` lists who is",
        )
    if len(found) > 1:
        told = ", ".join(str(place) for place, _ in found)
        raise ConfigError(
            f"{ledger.stream}: session {name!r} waits in {told}",
            next=f"choose one, like --topic {found[0][0]}",
        )
    _refuse_if_partition_waits(ledger, found[0][0])
    return found[0]


def can_be_released(session: Session, account: Account) -> bool:
    """Whether a release by hand does something for a session."""
    return session.finding is not None or _is_headless(session, account)


def _is_headless(session: Session, account: Account) -> bool:
    """Whether a session waits for a snapshot since messages were lost that may have been its own."""
    since = account.headless_since
    return is_in_doubt(session, since) and needs_snapshot(session, since)


def _refuse_if_partition_waits(ledger: Ledger, partition: Partition) -> None:
    """Nothing is released where the partition itself waits for a decision about its topic."""
    refuse_held(ledger, [partition])
    account = ledger.partitions[str(partition)]
    if account.retired or (
        account.halt is not None and account.halt.finding in FINDINGS_ENDED_BY_ACCEPT
    ):
        why = (
            "is retired"
            if account.retired
            else f"waits: {account.halt.finding}"
            if account.halt
            else ""
        )
        raise ConfigError(
            f"{ledger.stream}: {partition} {why}, so nobody in it is released by hand",
            next=f'decide about the topic first: seriatim accept {ledger.stream} {partition.topic} --because "…"',
        )


def _release_change(
    context: DecisionContext,
    partition: Partition,
    account: Account,
    release: SessionRelease,
    session: Session,
    attempt: str,
) -> Change:
    """The session's state without its finding, as a state file of its own; nothing else moves."""
    frontier = account.frontier
    counts = Counts(released=int(session.finding is not None))
    return Change(
        partition=partition,
        epoch=account.epoch,
        frontier=frontier,
        until=frontier,
        topic_id=account.topic_id,
        initial_frontier=account.initial_frontier,
        certificate=Certificate(
            partition=partition, epoch=account.epoch, start=frontier, until=frontier, counts=counts
        ),
        state=_save_session(
            context,
            partition,
            account,
            release.session,
            clear_finding(session, account, context.stream.tier),
            attempt,
        ),
        halt=account.halt,
        marks=(
            GapMark(
                finding=release.finding,
                offset=frontier,
                session=release.session,
                closed_by="hand",
                cause=release.reason,
            ),
        ),
        log_end=account.log_end,
    )


def clear_finding(session: Session, account: Account, tier: Tier) -> Session:
    """The session as of its last good state. A window waits for what is missing; elsewhere it is
    not asked for.

    Where it was in doubt, a person's word is as good as a snapshot.
    """
    begun = (
        account.headless_since
        if is_in_doubt(session, account.headless_since)
        else session.snapshot_offset
    )
    free = replace(
        session, finding=None, finding_offset=-1, damaged_since_offset=-1, snapshot_offset=begun
    )
    if tier == "window":
        return free
    return replace(
        free, sequence=None, snapshot_sequence=None, snapshot_fingerprint=b"", missing_sequences=[]
    )


def _save_session(
    context: DecisionContext,
    partition: Partition,
    account: Account,
    name: str,
    session: Session,
    attempt: str,
) -> tuple[File, ...]:
    files = account.state
    merged = merge_count([file.rows for file in files], 1)
    kept, merge = files[: len(files) - merged], files[len(files) - merged :]
    stem = f"{stem_prefix(account.epoch, account.frontier)}{attempt}"
    file = context.state.save(partition, stem, {name: session}, merge)
    crash_point("state-file-written")
    return (*kept, file)
