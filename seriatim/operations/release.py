"""Release: a person takes a session out of quarantine. The session keeps its last good state, and
messages from the frontier on are applied to it.

Quarantined messages stay in quarantine: with the release the person says that the session is right
without them. The session's sequence starts over with its next message, because that follows
messages that were never applied; only in tier window the missing ones are still waited for. A
session that is headless since messages were lost can be released as well: then none of the lost
messages was its own.

Next: ledger/entries.py says what an accept requires; operations/accept.py is for topics.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import Certificate, Files, save_state
from seriatim.engine.findings import GapMark, Tier
from seriatim.engine.offsets import Partition
from seriatim.engine.rules import is_in_doubt, needs_snapshot
from seriatim.engine.session import Counts, Session
from seriatim.engine.task import stem_prefix
from seriatim.errors import ConfigError, FencedError, raise_broken_promise
from seriatim.ledger.commit import TRIES_MAX, commit, require_head
from seriatim.ledger.entries import FINDINGS_ENDED_BY_ACCEPT, AcceptEntry
from seriatim.ledger.model import (
    Account,
    Change,
    Ledger,
    refuse_incompatible_machine,
    unmoved_change,
)
from seriatim.operations.accept import refuse_held
from seriatim.ports import OpenStream


class SessionRelease(Struct, kw_only=True):
    """The session that was released. After a dry run: the session that would be released."""

    session: str
    partition: Partition
    finding: str
    offset: int
    """The offset of the message that led to the quarantine."""
    frontier: int
    """Messages of the session are applied from this offset on."""
    reason: str
    sequence: int = -1
    """The entry of the release; -1 if nothing was committed."""


def release_session(
    open_stream: OpenStream,
    name: str,
    reason: str,
    topic: str | None = None,
    *,
    dry_run: bool = False,
) -> SessionRelease:
    """Release one session by hand. `topic` is a topic or a partition, if the name alone is not
    unique. Refused if the session does not wait, or if its partition waits as a whole.
    """
    for tries_left in reversed(range(TRIES_MAX)):
        head = require_head(open_stream.ledger, open_stream.stream.name)
        runner = open_stream.runner
        refuse_incompatible_machine(head.ledger, runner)
        partition, session = _find_waiting_session(open_stream, head.ledger, name, topic)
        account = head.ledger.account(partition) or raise_broken_promise(
            "a session lives in a known partition"
        )
        release = _describe_release(name, partition, session, account, reason)
        if dry_run:
            return release
        attempt = open_stream.new_attempt()
        change = _release_change(open_stream, partition, account, release, session, attempt)
        entry = AcceptEntry(
            attempt=attempt,
            product_version=__version__,
            changes=(change,),
            reason=reason,
        )
        try:
            _, committed = commit(open_stream.ledger, open_stream.clock, head, entry)
        except FencedError:
            if not tries_left:
                raise
            continue
        release.sequence = committed.sequence
        return release
    return raise_broken_promise("a release ends by a commit or an error")


def _describe_release(
    name: str, partition: Partition, session: Session, account: Account, reason: str
) -> SessionRelease:
    if session.finding:
        finding = session.finding
        offset = session.finding_offset
    else:
        # The session is headless since a loss; no message of its own is wrong.
        finding = "gap"
        offset = session.damaged_since_offset
    return SessionRelease(
        session=name,
        partition=partition,
        finding=finding,
        offset=offset,
        frontier=account.frontier,
        reason=reason,
    )


def _find_waiting_session(
    open_stream: OpenStream, ledger: Ledger, name: str, topic: str | None
) -> tuple[Partition, Session]:
    """The session, and the one partition in which it waits. Refused if there is none or several."""
    matches = _waiting_sessions(open_stream, ledger, name, topic)
    if not matches:
        in_topic = f" in {topic}" if topic else ""
        raise ConfigError(
            f"{ledger.stream}: session {name!r} is not in quarantine{in_topic}",
            next=f"`seriatim status {ledger.stream} --all` lists the sessions that are",
        )
    if len(matches) > 1:
        names = ", ".join(str(partition) for partition, _ in matches)
        raise ConfigError(
            f"{ledger.stream}: session {name!r} waits in {names}",
            next=f"choose one, like --topic {matches[0][0]}",
        )
    partition, session = matches[0]
    _refuse_if_partition_waits(ledger, partition)
    return partition, session


def _waiting_sessions(
    open_stream: OpenStream, ledger: Ledger, name: str, topic: str | None
) -> list[tuple[Partition, Session]]:
    """Every partition in which a session of this name waits."""
    matches = []
    for partition in ledger.known_partitions():
        if topic not in (None, partition.topic, str(partition)):
            continue
        account = ledger.partitions[str(partition)]
        if not account.quarantined and account.headless_since < 0:
            # Nothing waits in this partition, so that its state need not be read.
            continue
        session = open_stream.state.open_sessions(account.state, [name]).get(name)
        if session is not None and can_be_released(session, account):
            matches.append((partition, session))
    return matches


def can_be_released(session: Session, account: Account) -> bool:
    """Whether a session waits for something that a release by hand can end."""
    return session.finding is not None or _is_headless(session, account)


def _is_headless(session: Session, account: Account) -> bool:
    """Whether a session waits for a snapshot since messages were lost that may have been its own."""
    since = account.headless_since
    return is_in_doubt(session, since) and needs_snapshot(session, since)


def _refuse_if_partition_waits(ledger: Ledger, partition: Partition) -> None:
    """Refuse a release in a partition that waits as a whole: the topic has to be decided first."""
    refuse_held(ledger, [partition])
    account = ledger.partitions[str(partition)]
    advice = (
        "decide about the topic first:"
        f' seriatim accept {ledger.stream} {partition.topic} --because "…"'
    )
    if account.retired:
        reason = "is retired"
    elif account.halt is not None and account.halt.finding in FINDINGS_ENDED_BY_ACCEPT:
        reason = f"waits: {account.halt.finding}"
        if account.halt.finding == "expired":
            # `accept` refuses a topic that was not created again.
            advice = (
                "go on without the messages that are gone first:"
                f" seriatim repair {ledger.stream} --partition {partition} --forward --apply"
            )
    else:
        return
    raise ConfigError(
        f"{ledger.stream}: {partition} {reason}, so no session in it can be released by hand",
        next=advice,
    )


def _release_change(
    open_stream: OpenStream,
    partition: Partition,
    account: Account,
    release: SessionRelease,
    session: Session,
    attempt: str,
) -> Change:
    """The change that puts the session without its finding into a new state file. The frontier does
    not move.
    """
    frontier = account.frontier
    certificate = Certificate(
        partition=partition,
        epoch=account.epoch,
        start=frontier,
        until=frontier,
        counts=Counts(released=int(session.finding is not None)),
    )
    released_session = clear_finding(session, account, open_stream.stream.tier)
    mark = GapMark(
        finding=release.finding,
        offset=frontier,
        session=release.session,
        closed_by="hand",
        cause=release.reason,
    )
    return replace(
        unmoved_change(partition, account),
        certificate=certificate,
        state=_save_session(
            open_stream, partition, account, release.session, released_session, attempt
        ),
        halt=account.halt,
        marks=(mark,),
        log_end=account.log_end,
    )


def clear_finding(session: Session, account: Account, tier: Tier) -> Session:
    """The session as of its last good state, without its finding.

    Tier window still waits for messages that are missing; the other tiers do not ask for them. If
    the session was in doubt after a loss, the person's word counts like a snapshot where the loss
    ends.
    """
    snapshot_offset = session.snapshot_offset
    if is_in_doubt(session, account.headless_since):
        snapshot_offset = account.headless_since
    released = replace(session.without_finding(), snapshot_offset=snapshot_offset)
    if tier == "window":
        return released
    return replace(
        released,
        sequence=None,
        snapshot_sequence=None,
        snapshot_fingerprint=b"",
        missing_sequences=[],
    )


def _save_session(
    open_stream: OpenStream,
    partition: Partition,
    account: Account,
    name: str,
    session: Session,
    attempt: str,
) -> Files:
    """Write the session into a new state file, merged with the newest small ones. Returns all state
    files of the partition.
    """
    stem = f"{stem_prefix(account.epoch, account.frontier)}{attempt}"
    files = save_state(open_stream.state, partition, stem, {name: session}, account.state)
    crash_point("state-file-written")
    return files
