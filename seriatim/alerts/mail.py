"""Mails: an alert as text and as HTML for a person. Pure; a mail fetches nothing from elsewhere.

Every mail names the stream, what happened, which data is touched, how much time is left, and the
command to type next.

Next: alerts/incidents.py decides what is news; alerts/smtp.py sends the mail.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from urllib.parse import quote

import msgspec
from msgspec import Struct

from seriatim.alerts.incidents import NO_CALLBACK, REPAIR, RUN, Alert, Incident, Mail, Note
from seriatim.engine.findings import (
    FINDING_TITLES,
    Concern,
    Finding,
    format_duration,
    printable_session,
    shorten,
)
from seriatim.errors import render_screen
from seriatim.web.render import render_template

FINDINGS_LISTED_MAX = 20
SECTIONS_PER_KIND_MAX = 50
"""No mail server accepts a mail of many megabytes."""
FOR_EVER_SECONDS = 100 * 365 * 86_400
"""A retention may be so long that no calendar has the day of its end."""
SUBJECT_MAX = 150
FACT_MAX = 800
ERROR_TEXT_MAX = 2000
INCIDENT_TITLES = {RUN: "runs fail", REPAIR: "a repair failed"}


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

    def airflow_link(self, path: str) -> str:
        """The address of a page of Airflow; empty if Airflow's address is not known."""
        if not self.airflow_url:
            return ""
        return f"{self.airflow_url.rstrip('/')}/{path}"


def compose_mail(alert: Alert, context: MailContext, at_seconds: float) -> Mail:
    """The mail of an alert, in text and HTML."""
    opening = _opening(alert, context)
    sections = _sections(alert, context, at_seconds)
    links = _links(alert, context)
    text = _text(opening, sections, links)
    subject = f"[seriatim] {context.stream}: {_subject(alert)}".replace("\n", " ")
    identity = f"{context.stream}\n{at_seconds}\n{text}"
    return Mail(
        id=hashlib.sha256(identity.encode()).hexdigest()[:24],
        to=context.to or (),
        subject=shorten(subject, SUBJECT_MAX),
        text=text + "\n",
        html=render_template("mail.html", opening=opening, sections=sections, links=links),
        at_seconds=at_seconds,
    )


def _subject(alert: Alert) -> str:
    """The most urgent news of the alert."""
    if alert.findings:
        return _findings_subject(alert.findings)
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
    return f"over: {_incident_keys(alert.closed_incidents)}"


def _findings_subject(findings: list[Finding]) -> str:
    """The first finding, and how many more there are."""
    finding = findings[0]
    location = finding.partition_name or "the records table"
    subject = f"{FINDING_TITLES[finding.finding]} in {location}{_at_offset(finding)}"
    if len(findings) > 1:
        subject += f" and {len(findings) - 1} more"
    return subject


def _at_offset(finding: Finding) -> str:
    return f" at offset {finding.offset}" if finding.offset >= 0 else ""


def _incident_keys(incidents: list[Incident]) -> str:
    return ", ".join(incident.concern.key for incident in incidents)


def _opening(alert: Alert, context: MailContext) -> str:
    """One sentence that counts the news."""
    clauses = []
    if len(alert.failed_runs) > 1:
        clauses.append(f"{len(alert.failed_runs)} runs failed")
    elif alert.failed_runs:
        clauses.append("a run failed")
    if alert.recovered_runs:
        clauses.append("a run failed, and a later one went well")
    if alert.findings:
        clauses.append(_count(len(alert.findings), "new finding"))
    if alert.new_concerns:
        clauses.append(f"{_count(len(alert.new_concerns), 'thing')} to look at")
    if alert.reminded_incidents:
        clauses.append(f"{len(alert.reminded_incidents)} still open")
    if alert.closed_incidents:
        pronoun = "them" if len(alert.closed_incidents) > 1 else "it"
        clauses.append(f"{len(alert.closed_incidents)} over, nothing to do about {pronoun}")
    return f"Stream {context.stream}: {', '.join(clauses)}."


def _count(number: int, noun: str) -> str:
    plural = "s" if number > 1 else ""
    return f"{number} {noun}{plural}"


def _sections(alert: Alert, context: MailContext, at_seconds: float) -> list[MailSection]:
    """All sections of a mail: findings first, then runs, concerns, reminders and ends."""
    has_findings = bool(alert.findings)
    failed_sections = [
        _failed_run_section(run, context, is_reported=has_findings) for run in alert.failed_runs
    ]
    recovered_sections = [
        _failed_run_section(run, context, is_reported=True, prefix="Over: run failed")
        for run in alert.recovered_runs
    ]
    # A finding's own section already says what it halted or quarantined.
    covered_kinds = ("halted", "quarantine") if has_findings else ()
    concern_sections = [
        _concern_section(concern)
        for concern in alert.new_concerns
        if concern.kind not in covered_kinds
    ]
    reminder_sections = [
        _incident_section(incident, "still open", at_seconds)
        for incident in alert.reminded_incidents
    ]
    closed_sections = [
        _incident_section(incident, "over", at_seconds) for incident in alert.closed_incidents
    ]
    sections = _finding_sections(alert.findings, context, at_seconds)
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


def _finding_sections(
    findings: list[Finding], context: MailContext, at_seconds: float
) -> list[MailSection]:
    sections = [
        _finding_section(finding, context, at_seconds) for finding in findings[:FINDINGS_LISTED_MAX]
    ]
    omitted = len(findings) - FINDINGS_LISTED_MAX
    if omitted > 0:
        sections.append(_omitted_section(f"{omitted} more findings", context))
    return sections


def _omitted_section(headline: str, context: MailContext) -> MailSection:
    return MailSection(headline, {"next": f"seriatim status {context.stream}"})


def _finding_section(finding: Finding, context: MailContext, at_seconds: float) -> MailSection:
    title = FINDING_TITLES[finding.finding]
    location = finding.partition_name or "records table"
    headline = f"{title}: {context.stream} {location}: {finding.finding}{_at_offset(finding)}"
    if finding.session is not None:
        headline += f" (session {printable_session(finding.session)})"
    time_left = ""
    if finding.finding != "expired":
        # What an expired finding is about is gone already.
        time_left = _describe_time_left(finding.time_left_seconds, at_seconds)
    facts = {
        "expected": finding.expected,
        "found": finding.found,
        "cause": finding.cause,
        "touched": finding.touched,
        "time left": time_left,
        "next": finding.advice(context.stream),
        "in Airflow": _repair_link(finding, context),
    }
    short_facts = {label: shorten(fact, FACT_MAX) for label, fact in facts.items() if fact}
    return MailSection(headline, short_facts)


def _describe_time_left(seconds: int | None, at_seconds: float) -> str:
    """How long Kafka still has the data, and until when; empty if it has it for ever."""
    if seconds is None or seconds > FOR_EVER_SECONDS:
        return ""
    end = format_time(at_seconds + seconds)
    return (
        f"{format_duration(seconds)}: from {end} on, Kafka deletes messages that are not folded yet"
    )


def _repair_link(finding: Finding, context: MailContext) -> str:
    """The repair DAG, with the values to paste: its form cannot be filled in by a link."""
    link = context.airflow_link("dags/seriatim_repair")
    if not link:
        return ""
    values = {"stream": context.stream}
    if finding.partition >= 0:
        values["partition"] = finding.partition_name
    if finding.session is not None:
        values["session"] = finding.session
    text = f"{link} and paste {msgspec.json.encode(values).decode()}"
    if finding.can_go_forward:
        text += ", or with forward checked to go on without it"
    return text


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
    facts = {"task": failed_run.task, "run": run, "said": error_text}
    if not is_reported and not failed_run.next:
        facts["next"] = f"read the task's log, then: seriatim status {context.stream}"
    return MailSection(f"{prefix}: {_headline(failed_run)}", facts)


def _headline(failed_run: Note) -> str:
    first_line = failed_run.text.partition("\n")[0]
    return shorten(first_line) or "the scheduler gave no reason"


def _concern_section(concern: Concern) -> MailSection:
    facts = {"what": shorten(concern.text, FACT_MAX), "next": concern.next}
    return MailSection(concern.key, facts)


def _incident_section(incident: Incident, prefix: str, at_seconds: float) -> MailSection:
    """An incident that is still open, or over."""
    concern = incident.concern
    lasted_seconds = max(0.0, at_seconds - incident.since_seconds)
    since = f"{format_time(incident.since_seconds)}, {format_duration(lasted_seconds)}"
    facts = {"what": shorten(concern.text, FACT_MAX), "since": since}
    if prefix != "over":
        facts["next"] = concern.next
    title = INCIDENT_TITLES.get(concern.kind, concern.key)
    return MailSection(f"{prefix}: {title}", facts)


def _links(alert: Alert, context: MailContext) -> dict[str, str]:
    """Addresses by label: those of the newest failed run, the stream's page, the report."""
    runs = [*alert.recovered_runs, *alert.failed_runs]
    links = dict(runs[-1].links) if runs else {}
    links["stream"] = context.airflow_link(f"dags/{quote(context.stream)}")
    # A report tells nothing about a stream that could not be read.
    links["report"] = context.report_url if runs or alert.findings else ""
    return {label: url for label, url in links.items() if url}


def format_time(seconds: float) -> str:
    """A time as people read it, in UTC: 2026-11-18 02:32 UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _text(opening: str, sections: list[MailSection], links: dict[str, str]) -> str:
    screens = [render_screen(section.headline, {**section.facts}) for section in sections]
    text = "\n\n".join([opening, *screens])
    text += f"\n{'':<9}"
    for label, url in links.items():
        text += f"\n{label:<9}{url}"
    return text
