"""Mails: an alert as text and as HTML for a person. Pure; a mail fetches nothing from elsewhere.

Every mail names the stream, what happened, which data is touched, how bad it is and how urgent, what
happens if nobody acts, and the command to type next.

Next: alerts/incidents.py decides what is news; alerts/smtp.py sends the mail.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote
from zoneinfo import ZoneInfo

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from seriatim.alerts.incidents import (
    NO_CALLBACK,
    REPAIR,
    RUN,
    Alert,
    Incident,
    Mail,
    Note,
    is_about_output,
    is_caused_by_findings,
)
from seriatim.engine.findings import (
    FINDING_TITLES,
    Concern,
    Finding,
    FindingGroup,
    count_of,
    format_duration,
    group_findings,
    printable_session,
    runbook_row,
    shorten,
)
from seriatim.errors import render_screen
from seriatim.operations.status import (
    SWAPPED,
    PartitionStatus,
    QuarantinedSession,
    QuarantineGroup,
    StreamStatus,
    describe_quarantined_count,
    repair_values_of_concern,
    time_tone,
)
from seriatim.web.render import render_template

GROUPS_LISTED_MAX = 20
PLACES_LISTED_MAX = 5
SECTIONS_PER_KIND_MAX = 50
"""No mail server accepts a mail of many megabytes."""
FOR_EVER_SECONDS = 100 * 365 * 86_400
"""A retention may be so long that no calendar has the day of its end."""
SUBJECT_MAX = 150
FACT_MAX = 800
ERROR_TEXT_MAX = 2000
INCIDENT_TITLES = {RUN: "runs fail", REPAIR: "a repair failed"}
ENDED_TITLES = {RUN: "runs succeed again", REPAIR: "the repair that failed is settled"}
"""How the end of an incident is called, where its key alone would be misunderstood."""
WHERE_TO_TYPE = (
    "in the project's folder, on a host where Seriatim is installed;\n"
    "with docker-compose.yaml: docker compose exec scheduler bash"
)
WHERE_TO_PASTE = (
    "press Trigger, open Advanced Options, and replace all that Configuration JSON contains by:"
)
"""Airflow 3.3 has no address that opens the form, so the page of the DAG is as near as a link leads."""
HOW_TO_APPROVE = (
    "then press Trigger below it, and on the page of the run Required Actions:\n"
    "there you read the plan and approve it"
)
RUNBOOK = "docs/RUNBOOK.md"
UNREADABLE_SEVERITY = {
    "damaged": "not known, because the stream could not be read just now",
    "the rest": "what was committed before stays as it is",
    "urgent": "soon: until it can be read, nobody sees how long Kafka still has what is not folded",
    "if ignored": "if runs cannot read it either, nothing new is folded, and what Kafka deletes "
    "meanwhile is lost",
}
"""How bad it is, if there is no status of the stream."""


class MailSection(Struct, frozen=True):
    """One section of a mail: a headline, and facts by their labels."""

    headline: str
    facts: dict[str, str]


class MailContext(Struct, frozen=True, kw_only=True):
    """The recipients of a stream's mails, and the pages where a person looks at the stream."""

    stream: str
    to: tuple[str, ...] | None
    """None: the stream file cannot be read; the recipients that it named before get the mail."""
    airflow_url: str = ""
    report_url: str = ""
    """The newest report of the stream; empty if there is none."""
    timezone: str = "UTC"
    """The time zone in which the recipients read times, by its IANA name."""
    runbook_url: str = ""
    """The page with the runbook; empty if there is none."""
    where_to_type: str = ""
    """Where commands are typed on this host; empty: as `WHERE_TO_TYPE` says."""
    stops_at_open_circuit: bool = False
    """Whether runs fold nothing while the circuit is open: `on_check_failure = "stop"`."""
    status: StreamStatus | None = None
    """How the stream is; None if it could not be read."""

    def airflow_link(self, path: str) -> str:
        """The address of a page of Airflow; empty if Airflow's address is not known."""
        if not self.airflow_url:
            return ""
        return f"{self.airflow_url.rstrip('/')}/{path}"

    def runbook(self, name: str) -> str:
        """Where the runbook's row about a finding or an alert is."""
        name = "run failed" if name == RUN else name
        if self.runbook_url:
            return f"{self.runbook_url}#{runbook_row(name)}"
        return f"{RUNBOOK}, the row of `{name}`"

    def quarantined_session(self, finding: Finding) -> QuarantinedSession | None:
        """The session of a finding, if it is in quarantine because of it."""
        finding_place = (finding.partition_name, finding.session, finding.offset)
        for session in self.status.quarantined if self.status else []:
            if (session.partition_name, session.session, session.offset) == finding_place:
                return session
        return None


def compose_mail(alert: Alert, context: MailContext, at_seconds: float) -> Mail:
    """The mail of an alert, in text and HTML."""
    opening = _opening(alert, context)
    sections = _sections(alert, context, at_seconds)
    severity = describe_severity(alert, context, at_seconds)
    if severity:
        sections.insert(0, MailSection("How bad it is", severity))
    if any("next" in section.facts for section in sections):
        where = context.where_to_type or WHERE_TO_TYPE
        sections.append(MailSection("Where to type commands", {"where": where}))
    links = _links(alert, context)
    text = _text(opening, sections, links)
    subject = f"[seriatim] {context.stream}: {_subject(alert, context)}".replace("\n", " ")
    if alert.followed_mail is not None:
        subject = f"Re: {alert.followed_mail.subject}"
    identity = f"{context.stream}\n{at_seconds}\n{text}"
    html = render_template(
        "mail.html",
        opening=opening,
        sections=sections,
        links=links,
        airflow_url=context.airflow_url,
    )
    return Mail(
        id=hashlib.sha256(identity.encode()).hexdigest()[:24],
        to=context.to or (),
        subject=shorten(subject, SUBJECT_MAX),
        text=text + "\n",
        html=html,
        at_seconds=at_seconds,
        follows=alert.followed_mail.id if alert.followed_mail else "",
    )


def _subject(alert: Alert, context: MailContext) -> str:
    """The most urgent news of the alert."""
    if alert.findings:
        return _findings_subject(alert, context)
    if alert.new_concerns:
        concern = alert.new_concerns[0]
        # Trouble of the platform is usually the reason of a failed run, and less precise than it.
        if not (alert.failed_runs and concern.kind == "trouble"):
            return f"{concern.key}: {concern.text}"
    if alert.failed_runs:
        return f"run failed: {_headline(alert.failed_runs[-1])}"
    if alert.reminded_incidents:
        return f"still open: {_incident_keys(alert.reminded_incidents)}"
    if alert.recovered_runs:
        return f"over: run failed: {_headline(alert.recovered_runs[-1])}"
    return f"over: {', '.join(map(_ended_title, alert.closed_incidents))}"


def _ended_title(incident: Incident) -> str:
    """What is over, as a subject says it."""
    concern = incident.concern
    if concern.kind not in ENDED_TITLES:
        return concern.key
    return f"{ENDED_TITLES[concern.kind]} (before: {concern.text})"


def _findings_subject(alert: Alert, context: MailContext) -> str:
    """The first finding that still needs a person, and how many more there are."""
    findings = alert.findings
    waiting, _ = _split_well_findings(alert, context)
    finding = (waiting or findings)[0]
    location = finding.partition_name or "the records table"
    subject = f"{FINDING_TITLES[finding.finding]} in {location}{_at_offset(finding)}"
    session = context.quarantined_session(finding)
    if session is not None and session.cause == SWAPPED:
        subject += f" ({SWAPPED})"
    if len(findings) > 1:
        subject += f", and {len(findings) - 1} more"
    return subject if waiting else f"{subject}, well again by now"


def _at_offset(finding: Finding) -> str:
    return f" at offset {finding.offset}" if finding.offset >= 0 else ""


def _incident_keys(incidents: list[Incident]) -> str:
    return ", ".join(incident.concern.key for incident in incidents)


def _opening(alert: Alert, context: MailContext) -> str:
    """One sentence that counts the news."""
    clauses = []
    if len(alert.failed_runs) > 1:
        clauses.append(f"{count_of(len(alert.failed_runs), 'run')} failed")
    elif alert.failed_runs:
        clauses.append("a run failed")
    if alert.recovered_runs:
        clauses.append("a run failed, and a later one went well")
    if alert.followed_runs:
        clauses.append("the run that met what was mailed before has ended; its links are below")
    if alert.findings:
        clauses.append(count_of(len(alert.findings), "new finding"))
    shown_concerns = _shown_concerns(alert)
    if shown_concerns:
        clauses.append(f"{count_of(len(shown_concerns), 'thing')} to look at")
    if alert.reminded_incidents:
        clauses.append(f"{len(alert.reminded_incidents)} still open")
    if alert.closed_incidents:
        count = len(alert.closed_incidents)
        clause = f"{count_of(count, 'thing')} {'is' if count == 1 else 'are'} over"
        if not clauses:
            # Beside other news it would be read as if nothing had to be done about that.
            clause += f", nothing to do about {'it' if count == 1 else 'them'}"
        clauses.append(clause)
    return f"Stream {context.stream}: {', '.join(clauses)}."


def _sections(alert: Alert, context: MailContext, at_seconds: float) -> list[MailSection]:
    """All sections of a mail: findings first, then runs, concerns, reminders and ends."""
    failed_sections = [
        _failed_run_section(run, context, is_reported=_is_reported_by_findings(run, alert))
        for run in alert.failed_runs
    ]
    recovered_sections = [
        _failed_run_section(run, context, is_reported=True, prefix="Over: run failed")
        for run in alert.recovered_runs
    ]
    concern_sections = [_concern_section(concern, context) for concern in _shown_concerns(alert)]
    reminder_sections = [
        _incident_section(incident, "still open", context, at_seconds)
        for incident in alert.reminded_incidents
    ]
    closed_sections = [
        _incident_section(
            incident, "over", context, at_seconds, alert.endings.get(incident.concern.key, "")
        )
        for incident in alert.closed_incidents
    ]
    sections = _finding_sections(alert, context, at_seconds)
    for sections_of_kind in (
        failed_sections,
        recovered_sections,
        concern_sections,
        reminder_sections,
        closed_sections,
    ):
        sections += sections_of_kind[:SECTIONS_PER_KIND_MAX]
        omitted = len(sections_of_kind) - SECTIONS_PER_KIND_MAX
        if omitted > 0:
            sections.append(_omitted_section(f"{omitted} more of this kind", context))
    return sections


def _is_reported_by_findings(failed_run: Note, alert: Alert) -> bool:
    """Whether the findings of the alert say why a run failed. A run that failed for another reason
    has a section with its own error.
    """
    # Notes of older versions, and of runs without a failed task, do not name the error.
    is_caused = not failed_run.error or is_caused_by_findings(failed_run)
    return bool(alert.findings) and is_caused


def _shown_concerns(alert: Alert) -> list[Concern]:
    """The new concerns that have a section of their own. A finding's section already says what it
    halted or quarantined.
    """
    covered_kinds = ("halted", "quarantine", "swapped") if alert.findings else ()
    return [concern for concern in alert.new_concerns if concern.kind not in covered_kinds]


def _finding_sections(alert: Alert, context: MailContext, at_seconds: float) -> list[MailSection]:
    """A section for each finding that still needs a person; if there are many, one for each kind and
    cause. Those whose sessions are well again by now stand together at the end.
    """
    waiting, well = _split_well_findings(alert, context)
    groups = group_findings(waiting)
    sections = [_group_section(group, context, at_seconds) for group in groups[:GROUPS_LISTED_MAX]]
    omitted = len(groups) - GROUPS_LISTED_MAX
    if omitted > 0:
        sections.append(_omitted_section(f"{omitted} more kinds and causes", context))
    if well:
        sections.append(_well_section(well))
    return sections


def _split_well_findings(alert: Alert, context: MailContext) -> tuple[list[Finding], list[Finding]]:
    """The findings that still need a person, and those whose session has left quarantine before the
    mail was written.

    Only a status that is at least as new as the findings, and that lists all sessions, can say so.
    """
    status = context.status
    if status is None or alert.sequence is None or status.sequence < alert.sequence:
        return alert.findings, []
    if status.quarantined_count != len(status.quarantined):
        return alert.findings, []
    # Made once: a fault of the producer may bring thousands of sessions, each with a finding.
    in_quarantine = {(one.partition_name, one.session) for one in status.quarantined}
    waiting: list[Finding] = []
    well: list[Finding] = []
    for finding in alert.findings:
        is_of_session = finding.session is not None and finding.level == "error"
        if is_of_session and (finding.partition_name, finding.session) not in in_quarantine:
            well.append(finding)
        else:
            waiting.append(finding)
    return waiting, well


def _well_section(findings: list[Finding]) -> MailSection:
    """Findings with which nobody has to do anything any more."""
    headline = f"Well again by now: {count_of(len(findings), 'finding')}, nothing to do"
    sessions = [
        f"{printable_session(finding.session or '')}: {finding.finding} in {finding.location}"
        for finding in findings[:PLACES_LISTED_MAX]
    ]
    hidden = len(findings) - PLACES_LISTED_MAX
    if hidden > 0:
        sessions.append(f"and {hidden} more")
    return MailSection(headline, {"sessions": "\n".join(sessions)})


def _group_section(group: FindingGroup, context: MailContext, at_seconds: float) -> MailSection:
    """The first finding of a group, which stands for the others, and where the others are."""
    section = _finding_section(group.example, context, at_seconds)
    count = len(group.findings)
    if count == 1:
        return section
    headline = f"{count_of(count, 'finding')} of the same kind, first {section.headline}"
    others = ", ".join(finding.location for finding in group.findings[1:PLACES_LISTED_MAX])
    if count > PLACES_LISTED_MAX:
        others += f" and {count - PLACES_LISTED_MAX} more"
    return MailSection(headline, {"others": others, **section.facts})


def _omitted_section(headline: str, context: MailContext) -> MailSection:
    return MailSection(headline, {"next": f"seriatim status {context.stream} --all"})


def _finding_section(finding: Finding, context: MailContext, at_seconds: float) -> MailSection:
    title = FINDING_TITLES[finding.finding]
    location = finding.partition_name or "records table"
    headline = f"{title}: {context.stream} {location}: {finding.finding}{_at_offset(finding)}"
    if finding.session is not None:
        headline += f" (session {printable_session(finding.session)})"
    time_left = ""
    if finding.finding != "expired":
        # What an expired finding is about is gone already.
        time_left = _describe_time_left(finding.time_left_seconds, context, at_seconds)
    session = context.quarantined_session(finding)
    missing = session.missing if session is not None else None
    advice = finding.advice(context.stream)
    can_be_repaired = finding.can_be_repaired
    in_kafka = ""
    if session is not None and missing is not None:
        in_kafka = missing.describe()
        group = QuarantineGroup(finding=finding.finding, cause=session.cause, sessions=[session])
        if context.status is not None:
            advice = group.advice(context.status)
        # Without the message, a repair would find the same gap again.
        can_be_repaired = missing.is_swapped
    facts = {
        "expected": finding.expected,
        "found": finding.found,
        "cause": finding.cause,
        "in Kafka": in_kafka,
        "touched": finding.touched,
        "time left": time_left,
        "next": advice,
        "in Airflow": _repair_link(finding, context) if can_be_repaired else "",
        "runbook": context.runbook(finding.finding),
    }
    short_facts = {label: shorten(fact, FACT_MAX) for label, fact in facts.items() if fact}
    return MailSection(headline, short_facts)


def _describe_time_left(seconds: int | None, context: MailContext, at_seconds: float) -> str:
    """How long Kafka still has the data, and until when; empty if it has it for ever."""
    if seconds is None or seconds > FOR_EVER_SECONDS:
        return ""
    end = format_time(at_seconds + seconds, context.timezone)
    return (
        f"{format_duration(seconds)}: from {end} on, Kafka deletes messages that are not folded yet"
    )


def _repair_link(finding: Finding, context: MailContext) -> str:
    """Where the repair of a finding is in Airflow; empty without Airflow."""
    form = _repair_form(context, finding.repair_values)
    if form and finding.can_go_forward and "forward" not in finding.repair_values:
        form += '\nTo go on without the message, add "forward":true inside the braces above'
    return form


def _repair_form(context: MailContext, values: Mapping[str, str | bool]) -> str:
    """The repair DAG, where to paste, and what: its form cannot be filled in by a link."""
    link = context.airflow_link("dags/seriatim_repair")
    if not link:
        return ""
    form = msgspec.json.encode({"stream": context.stream, **values}).decode()
    return f"open {link}, {WHERE_TO_PASTE}\n{form}\n{HOW_TO_APPROVE}"


def _concern_form(concern: Concern, context: MailContext) -> str:
    """Where the repair of a concern is in Airflow; empty if a repair does not help."""
    partitions = context.status.partitions if context.status else []
    values = repair_values_of_concern(concern, partitions)
    return _repair_form(context, values) if values else ""


def _failed_run_section(
    failed_run: Note, context: MailContext, *, is_reported: bool, prefix: str = "Run failed"
) -> MailSection:
    """A failed run. `is_reported`: its error has a section of its own, or needs none."""
    run = failed_run.run
    if failed_run.inferred:
        run += f" ({NO_CALLBACK})"
    error_text = ""
    if not is_reported:
        _, _, text_after_headline = failed_run.text.partition("\n")
        error_text = shorten(text_after_headline.strip("\n"), ERROR_TEXT_MAX)
    facts = {"task": failed_run.task, "run": run, "error": error_text}
    if not is_reported and not failed_run.next:
        facts["next"] = f"read the task's log, then: seriatim status {context.stream}"
    if not is_reported:
        facts["runbook"] = context.runbook("run failed")
    return MailSection(f"{prefix}: {_headline(failed_run)}", facts)


def _headline(failed_run: Note) -> str:
    first_line = failed_run.text.partition("\n")[0]
    return shorten(first_line) or "the scheduler gave no reason"


def _concern_section(concern: Concern, context: MailContext) -> MailSection:
    facts = {"what": shorten(concern.text, FACT_MAX), "next": concern.next}
    facts["in Airflow"] = _concern_form(concern, context)
    facts["runbook"] = context.runbook(concern.kind)
    return MailSection(concern.key, facts)


def _incident_section(
    incident: Incident, prefix: str, context: MailContext, at_seconds: float, ending: str = ""
) -> MailSection:
    """An incident that is still open, or over; `ending` says what ended it."""
    concern = incident.concern
    lasted_seconds = max(0.0, at_seconds - incident.since_seconds)
    since_time = format_time(incident.since_seconds, context.timezone)
    since = f"{since_time}, {format_duration(lasted_seconds)}"
    facts = {"what": shorten(concern.text, FACT_MAX), "since": since}
    if ending:
        facts["ended by"] = shorten(ending, FACT_MAX)
    if prefix != "over":
        facts["next"] = concern.next
        facts["in Airflow"] = _concern_form(concern, context)
        facts["runbook"] = context.runbook(concern.kind)
    title = INCIDENT_TITLES.get(concern.kind, concern.key)
    return MailSection(f"{prefix}: {title}", facts)


def describe_severity(alert: Alert, context: MailContext, at_seconds: float) -> dict[str, str]:
    """How bad it is: what is damaged, what went on, whether the producer was asked, how urgent it
    is, and what happens if nobody acts. Empty if nothing is open.
    """
    status = context.status
    is_open = alert.findings or alert.new_concerns or alert.failed_runs or alert.reminded_incidents
    if not is_open:
        return {}
    if status is None:
        return UNREADABLE_SEVERITY
    halted = [partition for partition in status.partitions if partition.halt is not None]
    held = [partition for partition in status.partitions if partition.hold]
    waiting_count = len({partition.partition_name for partition in [*halted, *held]})
    damaged = []
    if status.quarantined_count:
        damaged.append(f"{describe_quarantined_count(status)} in quarantine")
    if waiting_count:
        partition_count = count_of(len(status.partitions), "partition")
        waits = "waits" if waiting_count == 1 else "wait"
        damaged.append(f"{waiting_count} of {partition_count} {waits} for a person")
    if status.circuit == "open":
        damaged.append("output that failed its check")
    if any(map(is_about_output, alert.failed_runs)):
        damaged.append("committed output: the failed run below says which")
    elif alert.is_output_damaged:
        damaged.append("committed output: the mail about the failed run says which")
    producer = ""
    if status.quarantined_count:
        producer = "not asked for snapshots: `snapshot_requests` is not set in the stream file"
        if status.snapshot_requests:
            producer = f"runs ask it for snapshots, on topic {status.snapshot_requests}"
    return {
        "damaged": ", ".join(damaged) or "no output",
        "the rest": _describe_rest(
            status, is_folded=not _is_nothing_folded(alert, status, context)
        ),
        "producer": producer,
        "urgent": _describe_urgency(alert, status, context, at_seconds),
        "if ignored": _describe_neglect(status, waiting_count),
    }


def _is_nothing_folded(alert: Alert, status: StreamStatus, context: MailContext) -> bool:
    """Whether no run folds anything: runs fail or do not come, or the check stops them."""
    is_stopped_by_check = context.stops_at_open_circuit and status.circuit == "open"
    return alert.is_nothing_folded or is_stopped_by_check


def _describe_rest(status: StreamStatus, *, is_folded: bool) -> str:
    """What was done with everything that is not damaged."""
    text = "went on" if is_folded else "waits, because no run folds it by now"
    text += f": folded up to entry {status.sequence}, checked up to entry {status.checked}"
    if status.published is not None:
        text += f", published up to entry {status.published}"
    if status.circuit == "open":
        text += "; nothing newer is published until the check is settled"
    return text


def _describe_urgency(
    alert: Alert, status: StreamStatus, context: MailContext, at_seconds: float
) -> str:
    """How soon somebody has to act, by what Kafka deletes and what readers miss.

    Messages that the next runs fold by themselves are no reason to act.
    """
    is_nothing_folded = _is_nothing_folded(alert, status, context)
    threatened = [
        partition
        for partition in status.partitions
        if is_nothing_folded or _needs_action(partition)
    ]
    nearest = replace(status, partitions=threatened).nearest
    if nearest is not None and nearest.time_left_seconds is not None:
        seconds = nearest.time_left_seconds
        if seconds <= FOR_EVER_SECONDS:
            end = format_time(at_seconds + seconds, context.timezone)
            text = f"act before {end}, in {format_duration(seconds)}: then Kafka deletes messages"
            return f"{text} of {nearest.partition_name} that are not folded yet"
    if status.circuit == "open":
        return "soon: readers of `current` get nothing newer"
    return "no: Kafka deletes nothing that is needed, as far as is known now"


def _needs_action(partition: PartitionStatus) -> bool:
    """Whether Kafka may delete messages of the partition that no run folds in time by itself."""
    if partition.halt is not None or partition.hold:
        return True
    return partition.catches_up is False or time_tone(partition) == "bad"


def _describe_neglect(status: StreamStatus, waiting_count: int) -> str:
    """What happens if nobody acts."""
    texts = []
    if waiting_count:
        texts.append(
            "the partitions that wait get nothing new, and what Kafka deletes meanwhile is lost"
        )
    if status.quarantined_count:
        texts.append(
            "the sessions in quarantine keep their last good rows until a snapshot of theirs,"
            " or a person, makes them right"
        )
    if status.circuit == "open":
        texts.append("`current` stays as it is")
    if not texts:
        texts.append("the next runs go on by themselves if they can; you are reminded")
    return "; ".join(texts)


def _links(alert: Alert, context: MailContext) -> dict[str, str]:
    """Addresses by label: those of the newest failed run, the stream's page, the report."""
    runs = [*alert.recovered_runs, *alert.failed_runs, *alert.followed_runs]
    links = dict(runs[-1].links) if runs else {}
    links["stream"] = context.airflow_link(f"dags/{quote(context.stream)}")
    # A report tells nothing about a stream that could not be read.
    links["report"] = context.report_url if runs or alert.findings else ""
    return {label: url for label, url in links.items() if url}


def format_time(seconds: float, timezone: str) -> str:
    """A time as people read it: 2026-11-18 02:32 UTC, or with the offset of its zone from UTC:
    2026-11-18 03:32+01:00.
    """
    if timezone == "UTC":
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    local_time = datetime.fromtimestamp(seconds, ZoneInfo(timezone))
    return local_time.isoformat(sep=" ", timespec="minutes")


def _text(opening: str, sections: list[MailSection], links: dict[str, str]) -> str:
    screens = [render_screen(section.headline, {**section.facts}) for section in sections]
    text = "\n\n".join([opening, *screens])
    text += f"\n{'':<9}"
    for label, url in links.items():
        text += f"\n{label:<9}{url}"
    return text
