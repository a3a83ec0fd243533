"""Integrity: findings as values, and the verdict each tier gives on them.

A finding is what is wrong with the data, named by stream, topic, partition and offset. A tier says
what follows: `count` it, `drop` the message, `halt` the partition, or set the session aside.

Next room: fold.py meets findings; ledger.py remembers them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct

from seriatim.errors import IntegrityError, ensure, render_screen
from seriatim.kafka.retention import format_duration

Tier = Literal["none", "once", "order", "window", "strict"]
TIERS: tuple[Tier, ...] = ("none", "once", "order", "window", "strict")
FindingScope = Literal["stream", "partition", "session"]
FindingAction = Literal["count", "drop", "halt", "wait", "heal"]

FINDINGS_REPORTED_MAX = 100
"""Findings listed per partition and slice; beyond it they are counted."""

_TIER_TABLE: dict[str, tuple[FindingAction, ...]] = {
    # finding         none     once     order    window   strict
    "re-created": ("halt", "halt", "halt", "halt", "halt"),
    "truncated": ("halt", "halt", "halt", "halt", "halt"),
    "gap": ("count", "halt", "count", "halt", "halt"),
    "expired": ("count", "halt", "count", "halt", "halt"),
    "sequence gap": ("count", "halt", "count", "wait", "halt"),
    "repeat": ("count", "drop", "drop", "drop", "halt"),
    "disorder": ("count", "count", "drop", "heal", "halt"),
    "moved session": ("count", "halt", "count", "halt", "halt"),
    "precondition": ("count", "halt", "count", "halt", "halt"),
    "raised": ("halt", "halt", "halt", "halt", "halt"),
}
TIER_ACTIONS: dict[str, dict[Tier, FindingAction]] = {
    kind: dict(zip(TIERS, row, strict=True)) for kind, row in _TIER_TABLE.items()
}
"""DESIGN: the tier table. `halt` is narrow: the partition, or the session (quarantine)."""

FINDING_TITLES = {
    "gap": "GapError",
    "sequence gap": "GapError",
    "expired": "ExpiredError",
    "re-created": "RecreatedError",
    "truncated": "TruncatedError",
    "repeat": "RepeatError",
    "disorder": "DisorderError",
    "moved session": "MovedSessionError",
    "precondition": "PreconditionError",
    "raised": "RaisedError",
    "poison": "PoisonError",
    "foreign": "ForeignCommitError",
    "check": "CheckError",
    "time left": "TimeLeftWarning",
    "snapshot distance": "SnapshotDistanceWarning",
}


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing wrong with the data, and where."""

    finding: str
    topic: str = ""
    partition: int = -1
    offset: int = -1
    session: str | None = None
    expected: str = ""
    found: str = ""
    cause: str = ""
    touched: str = ""
    level: Literal["error", "warning"] = "error"
    sequence: int = -1
    """Check: the ledger entry up to which it was judged."""
    log_end: int = -1
    """Truncated: where Kafka's log ends now."""
    time_left_seconds: int | None = None
    """Until Kafka drops the message at its partition's frontier, when it was told."""

    def __post_init__(self) -> None:
        ensure(self.finding in FINDING_TITLES, "unknown finding", finding=self.finding)

    @property
    def scope(self) -> FindingScope:
        """What it hurts: a session, a partition, or the stream."""
        if self.session is not None:
            return "session"
        return "partition" if self.partition >= 0 else "stream"

    @property
    def partition_name(self) -> str:
        """Where, as people write it."""
        return f"{self.topic}/{self.partition}" if self.partition >= 0 else self.topic

    @property
    def advice_key(self) -> str:
        """Which of the pieces of advice in `FINDING_ADVICE` is about it."""
        kind = self.finding
        if kind == "poison" and self.level == "warning":
            return "skipped"
        if self.scope == "session" and kind != "snapshot distance":
            return "session" if self.level == "error" else "passed"
        if kind == "check" and self.level == "warning":
            return "doubtful"
        return kind

    @property
    def can_go_forward(self) -> bool:
        """Whether `repair --forward` goes on without it."""
        return self.advice_key in FORWARD

    def advice(self, stream: str) -> str:
        """What to do about it."""
        named = {
            "place": self.partition_name,
            "topic": self.topic,
            "expected": self.expected,
            "sequence": self.sequence,
        }
        return FINDING_ADVICE[self.advice_key].format(stream=stream, **named)

    def to_dict(self, stream: str) -> dict[str, Any]:
        """As one JSON object for scripts."""
        return {
            "finding": self.finding,
            "level": self.level,
            "stream": stream,
            "topic": self.topic or None,
            "partition": self.partition if self.partition >= 0 else None,
            "offset": self.offset if self.offset >= 0 else None,
            "session": self.session,
            "expected": self.expected or None,
            "found": self.found or None,
            "cause": self.cause or None,
            "time_left_seconds": self.time_left_seconds,
            "next": self.advice(stream),
        }

    def render(self, stream: str) -> str:
        """As a person reads it: one screen."""
        at = f" at offset {self.offset}" if self.offset >= 0 else ""
        of = f" (session {printable_session(self.session)})" if self.session is not None else ""
        headline = f"{FINDING_TITLES[self.finding]}: {stream} {self.partition_name or 'records table'}: {self.finding}{at}{of}"
        facts = {
            "expected": self.expected,
            "found": self.found,
            "cause": self.cause,
            "touched": self.touched,
            "time_left": ""
            if self.time_left_seconds is None
            else format_duration(self.time_left_seconds),
            "next": self.advice(stream),
        }
        return render_screen(headline, {label: shorten(fact) for label, fact in facts.items()})


class FindingsError(IntegrityError):
    """A command failed by findings or by a check's verdict: the ledger has them, and alerts tell
    them by themselves.
    """

    def __init__(
        self, message: str, *, findings: Iterable[Finding] = (), next: str = "", **fields: Any
    ) -> None:
        super().__init__(message, next=next, **fields)
        self.findings = tuple(findings)
        """Those that are new; none, where an earlier verdict stops the stream."""


class GapMark(
    Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"closed_by": "closed"}
):
    """Where output stops, or begins again, to be what it should: a gap's edge, for the ledger and
    the gaps table.
    """

    finding: str
    offset: int
    """Opened: the first offset whose output is not to be trusted. Closed: the first that is right
    again.
    """
    session: str | None = None
    """None: all sessions of the partition."""
    until: int = -1
    """A gap that is closed as soon as it is known, such as missing offsets: its end."""
    cause: str = ""
    closed_by: str = ""
    """What closed it: snapshot, repair, forward, hand. Empty: this mark opens."""
    quarantined: bool = False
    """Whether the session's messages are set aside meanwhile."""
    topic_id: str = ""
    """Of the topic's earlier life, where it is of that; empty: as the change says."""


FORWARD = ("expired", "poison")
"""Advice that offers `repair --forward`."""
FINDING_ADVICE = {
    "gap": "seriatim repair {stream} --partition {place}\n"
    "looks again and says what is gone. The partition waits and loses nothing; the other partitions go on",
    "expired": "raise the topic's retention now, so that no more is lost; the other partitions go on. Then, to go on\n"
    "without what is gone, with the gap published: seriatim repair {stream} --partition {place} --forward --apply\n"
    'If the topic is over for good: seriatim retire {stream} {topic} --because "…"',
    "re-created": "ask who deleted and made the topic again. The partition waits with its old state; the other topics\n"
    "go on. If its new life is meant (--dry-run shows what that does):\n"
    'seriatim accept {stream} {topic} --because "…"',
    "truncated": "ask what happened to the topic's log (restored broker, unclean leader election?). The partition\n"
    "waits, the others go on. To follow the log back to where it ends now:\n"
    "seriatim repair {stream} --partition {place}",
    "poison": "the partition waits at this message, the others go on. Look at it with Kafka's own tools. To go on\n"
    "without it, with the gap published: seriatim repair {stream} --partition {place} --forward --apply",
    "passed": "look at the producer if it happens often; nothing waits for you. `seriatim gaps {stream}` says which\n"
    "output is not to be trusted, until the session's next snapshot",
    "skipped": "look at the producer: the message was passed over, as on_poison in the stream file says",
    "session": "fix the producer or the machine, then: seriatim repair {stream} --partition {place}\n"
    "The session's messages are kept (table quarantine); its next snapshot makes it right, too",
    "snapshot distance": "ask the producer for snapshots at the agreed distance: one lost message spoils the session\n"
    "until its next one. Nothing is wrong yet; alerts.snapshot_distance_max_minutes has the agreed distance",
    "time left": "`seriatim run {stream}` folds what waits; `seriatim status {stream}` says if it waits for a person.\n"
    "To keep messages longer:\n"
    "kafka-configs.sh --bootstrap-server SERVER --alter --entity-type topics --entity-name {topic}"
    " --add-config {expected}",
    "foreign": "find who wrote to the records table beside Seriatim, and take that write back;\n"
    "`seriatim verify {stream}` says whether all is well again. Then:\n"
    'seriatim accept {stream} --restored --because "…"',
    "check": "nothing newer is published until this is settled. If the output is wrong:\n"
    "seriatim repair {stream} --partition {place}, then seriatim check {stream}\n"
    'If it is right as it is: seriatim accept {stream} --sequence {sequence} --because "…"',
    "doubtful": "look at it when there is time: a warning holds nothing back. Its severity is in the suite named above",
}
for _kind in ("sequence gap", "repeat", "disorder", "moved session", "precondition", "raised"):
    FINDING_ADVICE[_kind] = FINDING_ADVICE["session"]


def shorten(text: str | None, length: int = 400) -> str:
    """At most `length` characters on one screen, control characters made visible."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text or "")
    return shown if len(shown) <= length else f"{shown[:length]}… ({len(shown)} characters)"


def printable_session(session: str) -> str:
    """A session's name within a line: it cannot end the line and go on as if it were ours, and no
    name is seen, too.
    """
    return shorten(session.replace("\n", "\\n")) or "''"


def shell_quote(text: str) -> str:
    """A word of a command that people paste, so that a shell takes any name for itself and runs
    nothing of it.
    """
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./-]+", text):
        return text
    if text.isprintable():
        return "'" + text.replace("'", "'\"'\"'") + "'"
    plain = (
        c if c.isprintable() else "".join(f"\\x{byte:02x}" for byte in c.encode()) for c in text
    )
    told = {"\\": "\\\\", "'": "\\'"}
    return "$'" + "".join(told.get(part, part) for part in plain) + "'"


def tier_action(kind: str, tier: Tier) -> FindingAction:
    """What a tier does about a finding. Poison has its own rule, `on_poison`."""
    return TIER_ACTIONS[kind][tier]


def new_findings_error(stream: str, findings: list[Finding]) -> FindingsError:
    """The error for findings that are new in this run."""
    ensure(bool(findings), "no findings, no failure")
    places = sorted({finding.partition_name or "the records table" for finding in findings})
    more = (
        " or more"
        if any(
            count >= FINDINGS_REPORTED_MAX
            for count in Counter(f.partition_name for f in findings).values()
        )
        else ""
    )
    return FindingsError(
        f"{stream}: {len(findings)}{more} new finding{'s' * (len(findings) > 1)} in {', '.join(places[:5])}"
        + (f" and {len(places) - 5} more" if len(places) > 5 else ""),
        findings=findings,
        next=f"read the findings above; `seriatim status {stream}` shows what waits",
    )
