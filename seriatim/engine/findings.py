"""Findings: what may be wrong with the data, and what each tier does about it.

A finding names the stream, topic, partition and offset where something is wrong. The tier of the
stream says what follows: `count` it, `drop` the message, or `halt`, which stops the partition or
sends the session into quarantine.

Next: engine/fold.py reports findings; ledger/entries.py stores them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import Struct

from seriatim.engine.messages import session_name_of_partition
from seriatim.engine.offsets import Partition
from seriatim.errors import IntegrityError, ensure, render_screen

Tier = Literal["none", "once", "order", "window", "strict"]
TIERS: tuple[Tier, ...] = ("none", "once", "order", "window", "strict")
OnPoison = Literal["quarantine", "halt", "skip"]
"""What a stream does about a message that cannot be decoded."""
FindingScope = Literal["stream", "partition", "session"]
FindingAction = Literal["count", "drop", "halt", "wait", "heal"]
ConcernKind = Literal[
    "time left",
    "halted",
    "held",
    "quarantine",
    "swapped",
    "buffer",
    "late",
    "circuit",
    "blind",
    "run",
    "repair",
    "trouble",
]
"""The kinds of concerns. `swapped`: the message that a session waited for has arrived. `blind`: how
long Kafka keeps messages is not known. `trouble`: the stream could not be looked at.
"""

FINDINGS_IN_FULL_MAX = 3
"""More findings than this are put into groups, so that they fit on one screen."""
EXAMPLES_MAX = 3
"""Places that a group of findings names, at most."""
PARTITIONS_NAMED_MAX = 5
"""Partitions that the error of new findings names."""
FINDINGS_REPORTED_MAX = 100
"""Findings of one level that are listed per partition and slice. Further ones are only counted."""

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
TIER_ACTIONS: dict[str, dict[Tier, FindingAction]] = {}
"""The tier table: what each tier does about each finding. `halt` stops only the partition, or only
the session (quarantine).
"""
for _finding_kind, _actions in _TIER_TABLE.items():
    TIER_ACTIONS[_finding_kind] = dict(zip(TIERS, _actions, strict=True))

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
WARNING_KINDS = ("time left", "snapshot distance")
"""Kinds that are never an error. They have advice of their own, also where a session is named."""


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
    """Of a check: the ledger entry up to which it looked."""
    log_end: int = -1
    """Of a truncated log: where Kafka's log ends now."""
    time_left_seconds: int | None = None
    """How long, when it was reported, until Kafka deletes the message at the frontier."""

    def __post_init__(self) -> None:
        ensure(self.finding in FINDING_TITLES, "unknown finding", finding=self.finding)

    @classmethod
    def at(cls, partition: Partition, finding: str, offset: int, **fields: Any) -> Finding:
        """A finding at an offset of a partition. `fields` are those that say more."""
        return cls(
            finding=finding,
            topic=partition.topic,
            partition=partition.number,
            offset=offset,
            **fields,
        )

    @property
    def scope(self) -> FindingScope:
        """What it is about: a session, a partition, or the stream."""
        if self.session is not None:
            return "session"
        return "partition" if self.partition >= 0 else "stream"

    @property
    def partition_name(self) -> str:
        """The partition as people write it; the topic alone if there is no partition."""
        if self.partition < 0:
            return self.topic
        return f"{self.topic}/{self.partition}"

    @property
    def location(self) -> str:
        """The partition and the offset, as people write them."""
        name = self.partition_name or "records table"
        return f"{name} at offset {self.offset}" if self.offset >= 0 else name

    @property
    def advice_key(self) -> str:
        """The key of its advice in `FINDING_ADVICE`."""
        kind = self.finding
        if kind == "poison" and self.level == "warning":
            return "skipped"
        if self.scope == "session" and kind not in WARNING_KINDS:
            return self._advice_key_of_session()
        if kind == "check" and self.level == "warning":
            return "doubtful"
        return kind

    def _advice_key_of_session(self) -> str:
        kind = self.finding
        if self.level == "warning":
            return "passed"
        if kind == "poison":
            return "poisoned session"
        partition = Partition(self.topic, self.partition)
        if kind == "precondition" and self.session == session_name_of_partition(partition):
            return "partition as session"
        return kind if kind in LASTING_FINDINGS else "session"

    @property
    def can_go_forward(self) -> bool:
        """Whether `repair --forward` goes on without it."""
        return self.advice_key in FORWARD

    @property
    def can_be_repaired(self) -> bool:
        """Whether a repair may help as things are, without another tier and without a decision."""
        return self.advice_key in REPAIRABLE

    @property
    def repair_values(self) -> dict[str, str | bool]:
        """What the form of the repair DAG takes beside the stream, so that it repairs this finding."""
        values: dict[str, str | bool] = {}
        if self.partition >= 0:
            values["partition"] = self.partition_name
        if self.session is not None:
            values["session"] = self.session
        # What is expired cannot be read any more. A message that could not be decoded may be readable
        # by now, and forward would lose it.
        if self.finding == "expired":
            values["forward"] = True
        return values

    def advice(self, stream: str, *, all_partitions: bool = False) -> str:
        """What to do about it. With `all_partitions` it stands for sessions of several partitions, and
        a command that folds them again names none.
        """
        return FINDING_ADVICE[self.advice_key].format(
            stream=stream,
            place=self.partition_name,
            partition_option="" if all_partitions else f" --partition {self.partition_name}",
            topic=self.topic,
            session=shell_quote(self.session or ""),
            expected=self.expected,
            sequence=self.sequence,
        )

    def to_dict(self, stream: str) -> dict[str, Any]:
        """The finding as one JSON object for scripts."""
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
        """The finding as a text of one screen for people."""
        title = FINDING_TITLES[self.finding]
        where = self.partition_name or "records table"
        headline = f"{title}: {stream} {where}: {self.finding}"
        if self.offset >= 0:
            headline += f" at offset {self.offset}"
        if self.session is not None:
            headline += f" (session {printable_session(self.session)})"
        time_left = ""
        if self.time_left_seconds is not None:
            time_left = format_duration(self.time_left_seconds)
        facts = {
            "expected": self.expected,
            "found": self.found,
            "cause": self.cause,
            "touched": self.touched,
            "time_left": time_left,
            "next": self.advice(stream),
        }
        return render_screen(headline, {label: shorten(fact) for label, fact in facts.items()})


class Concern(Struct, frozen=True, kw_only=True, rename={"kind": "concern", "location": "place"}):
    """One problem that needs a person."""

    kind: str
    """One of `ConcernKind`. Its type is wider: a status file or an outbox of a newer version may have
    a kind that this version does not know, and must stay readable.
    """
    location: str = ""
    text: str
    next: str

    @property
    def key(self) -> str:
        """Identifies the same concern in the next observation."""
        return f"{self.kind} {self.location}".strip()


class FindingsError(IntegrityError):
    """A command failed because of findings or a check's verdict. The ledger has them already, and
    alerts report them from there.
    """

    def __init__(
        self, message: str, *, findings: Iterable[Finding] = (), next: str = "", **fields: Any
    ) -> None:
        super().__init__(message, next=next, **fields)
        self.findings = tuple(findings)
        """The findings that are new. None if an earlier verdict stops the stream."""


class GapMark(
    Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"closed_by": "closed"}
):
    """One end of a gap, for the ledger and the gaps table: where output begins to be wrong, or is
    right again.
    """

    finding: str
    offset: int
    """The first offset whose output is not to be trusted; of a mark that closes, the first offset
    whose output is right again.
    """
    session: str | None = None
    """None: all sessions of the partition."""
    until: int = -1
    """The end of a gap that is closed as soon as it is known, such as missing offsets."""
    cause: str = ""
    closed_by: str = ""
    """What closed the gap: snapshot, repair, forward, hand. Empty: this mark opens a gap."""
    quarantined: bool = False
    """Whether the session's messages are quarantined meanwhile."""
    sorted_until: int = -1
    """Of a mark that closes: a repair applied the session's messages from `offset` up to here in the
    order of their sequences, because they were swapped.
    """
    topic_id: str = ""
    """The topic id, if the gap is in the topic's earlier life. Empty: the topic id of the change."""


LASTING_FINDINGS = ("sequence gap", "repeat", "disorder", "moved session")
"""Findings of a session that the same messages give again: folding them again does not help."""
FORWARD = ("expired", "poison")
"""Keys of the advice that offers `repair --forward`."""
REPAIRABLE = (
    *FORWARD,
    "gap",
    "truncated",
    "session",
    "precondition",
    "raised",
    "check",
)
"""Keys of the advice of which `seriatim repair` is a part. The others are a person's decision, a warning,
or a finding of `LASTING_FINDINGS`.
"""
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
    "poison": "the partition waits at this message, the others go on. Look at it with Kafka's own tools. If the\n"
    "decoder, the schema registry or the stream file was changed since, so that it can be read:\n"
    "seriatim repair {stream} --partition {place} --apply\n"
    "To go on without it, with the gap published: seriatim repair {stream} --partition {place} --forward --apply",
    "passed": "look at the producer if it happens often; nothing waits for you. `seriatim gaps {stream}` says which\n"
    "output is not to be trusted, until the session's next snapshot",
    "skipped": "look at the producer: the message was passed over, as on_poison in the stream file says",
    "poisoned session": "ask the producer for a snapshot of the session, or wait for its next one: that makes\n"
    "it right. Folding again helps only if the decoder, the schema registry or the stream file was\n"
    "changed since; then: seriatim repair {stream}{partition_option}",
    "session": "ask the producer for a snapshot of the session: that makes it right. Folding the same messages\n"
    "again helps only if the machine was wrong: fix it, then: seriatim repair {stream}{partition_option}\n"
    "The session's messages are kept (table quarantine)",
    "partition as session": "all messages of the partition are this one session. If they have snapshots, the\n"
    "next one makes it right. Debezium's have none that tells its end: docs/STREAMS.md, Reading the table\n"
    "again, says how the table gets right. The session's messages are kept (table quarantine)",
    "sequence gap": "ask the producer for a snapshot of the session: that makes it right. `seriatim status {stream}`\n"
    "says whether the missing message came later, and what helps then; it cannot say so if Kafka has\n"
    "deleted the messages from the gap on. If it never came, and the session is right without it:\n"
    'seriatim quarantine release {stream} {session} --topic {place} --because "…"',
    "repeat": "ask the producer for a snapshot of the session: that makes it right. Folding again finds the repeat\n"
    'again, unless tier = "once" in the stream file drops it; then: seriatim repair {stream}{partition_option}',
    "disorder": "ask the producer for a snapshot of the session: that makes it right. Folding again finds the\n"
    'disorder again, unless tier = "window" in the stream file puts messages into order; then:\n'
    "seriatim repair {stream}{partition_option}",
    "moved session": "ask the producer for a snapshot of the session: that makes it right. Its messages go to another\n"
    "partition now, because partitions were added or the producer chooses them in another way.\n"
    "Folding again finds the same",
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
for _kind in ("precondition", "raised"):
    FINDING_ADVICE[_kind] = FINDING_ADVICE["session"]


class FindingGroup(Struct, frozen=True):
    """Findings of one kind, level and cause: a person reads them at once."""

    findings: list[Finding]

    @property
    def example(self) -> Finding:
        """The first of them, which stands for the others."""
        return self.findings[0]

    def render(self, stream: str) -> str:
        """The group as a text of a few lines for people."""
        example = self.example
        if len(self.findings) == 1:
            return example.render(stream)
        partitions = list(dict.fromkeys(finding.partition_name for finding in self.findings))
        sessions = {finding.session for finding in self.findings if finding.session is not None}
        place_name = (
            partitions[0] if len(partitions) == 1 else count_of(len(partitions), "partition")
        )
        headline = (
            f"{FINDING_TITLES[example.finding]}: {stream} {place_name or 'records table'}:"
            f" {len(self.findings)} × {example.finding}"
        )
        if sessions:
            headline += f", {count_of(len(sessions), 'session')}"
        examples = [finding.location for finding in self.findings[:EXAMPLES_MAX]]
        facts = {
            "where": list_some(partitions, EXAMPLES_MAX),
            "first": list_some(examples, EXAMPLES_MAX, len(self.findings)),
            "cause": example.cause,
            "next": example.advice(stream, all_partitions=len(partitions) > 1),
        }
        return render_screen(headline, {label: shorten(fact) for label, fact in facts.items()})


def group_findings(findings: Iterable[Finding]) -> list[FindingGroup]:
    """Findings by kind, level and cause, errors first, then the largest group. A few findings are
    not put together: each is read by itself.
    """
    findings = list(findings)
    if len(findings) <= FINDINGS_IN_FULL_MAX:
        return [FindingGroup([finding]) for finding in findings]
    by_cause: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        # Offsets and sequences in a cause do not make it another cause.
        cause = re.sub(r"[0-9]+", "0", finding.cause)
        by_cause.setdefault((finding.level, finding.finding, cause), []).append(finding)

    def rank(group_key: tuple[str, str, str]) -> tuple[str, int, tuple[str, str, str]]:
        # By the alphabet errors come before warnings.
        level = group_key[0]
        return level, -len(by_cause[group_key]), group_key

    group_keys = sorted(by_cause, key=rank)
    return [FindingGroup(by_cause[group_key]) for group_key in group_keys]


def runbook_row(name: str) -> str:
    """The id of the runbook's row about a finding or an alert: its name with dashes."""
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def shorten(text: str | None, length: int = 400) -> str:
    """The text with control characters made visible, cut to `length` characters."""
    visible = ""
    for character in text or "":
        if character.isprintable() or character == "\n":
            visible += character
        else:
            visible += repr(character)[1:-1]
    if len(visible) <= length:
        return visible
    return f"{visible[:length]}… ({len(visible)} characters)"


def printable_session(session: str) -> str:
    """A session's name for use within a line. It cannot end the line, and an empty name is visible."""
    return shorten(session.replace("\n", "\\n")) or "''"


def shell_quote(text: str) -> str:
    """A word of a command that people paste. The shell takes it as one word and runs nothing of it."""
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./-]+", text):
        return text
    if text.isprintable():
        return "'" + text.replace("'", "'\"'\"'") + "'"
    # Control characters need the form $'…', in which a backslash escapes.
    escaped = ""
    for character in text:
        if character in ("\\", "'"):
            escaped += "\\" + character
        elif character.isprintable():
            escaped += character
        else:
            escaped += "".join(f"\\x{byte:02x}" for byte in character.encode())
    return f"$'{escaped}'"


def count_of(number: int, noun: str) -> str:
    """A count with its noun: `1 slice`, `2 slices`, `2 entries`."""
    return f"{number} {noun_of(number, noun)}"


def noun_of(number: int, noun: str) -> str:
    """A noun in the form that a number asks for."""
    if number == 1:
        return noun
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def list_some(
    names: Sequence[str], shown_max: int, count: int | None = None, separator: str = ", "
) -> str:
    """The first names, and how many more there are: `a, b and 3 more`. `count` is the number of all
    if `names` are not all.
    """
    text = separator.join(names[:shown_max])
    hidden = (len(names) if count is None else count) - shown_max
    return f"{text} and {hidden} more" if hidden > 0 else text


def format_duration(seconds: float) -> str:
    """A duration as people read it: 61 h 20 min."""
    minutes, rest_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest_seconds} s"
    return f"{rest_seconds} s"


def format_moment(seconds: float) -> str:
    """A date and time as people read it: 2026-11-18 02:32:05 UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def format_iso_moment(seconds: float) -> str:
    """A date and time as scripts read it, in one word: 2026-11-18T02:32:05Z."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def tier_action(kind: str, tier: Tier) -> FindingAction:
    """What a tier does about a finding. For poison there is no tier, but `OnPoison`."""
    return TIER_ACTIONS[kind][tier]


def new_findings_error(stream: str, findings: list[Finding]) -> FindingsError:
    """The error for findings that are new in this run."""
    ensure(bool(findings), "no findings, no failure")
    names = [finding.partition_name or "the records table" for finding in findings]
    partitions = list_some(sorted(set(names)), PARTITIONS_NAMED_MAX)
    count = str(len(findings))
    if max(Counter(names).values()) >= FINDINGS_REPORTED_MAX:
        count += " or more"
    noun = "finding" if len(findings) == 1 else "findings"
    return FindingsError(
        f"{stream}: {count} new {noun} in {partitions}",
        findings=findings,
        next=f"read the findings above; `seriatim status {stream}` shows what waits",
    )
