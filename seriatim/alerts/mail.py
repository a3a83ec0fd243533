"""Mails: an alert as a person reads it, in text and in HTML. Pure; nothing in it is fetched from
elsewhere.

Every mail says the stream, what happened, what is touched, how long there is, and what to type
next.

Next room: alerts/incidents.py decides what is news; alerts/smtp.py sends it.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from html import escape
from urllib.parse import quote

import msgspec
from msgspec import Struct

from seriatim.alerts.incidents import REPAIR, RUN, Alert, Concern, Incident, Mail, Note
from seriatim.engine.findings import FINDING_TITLES, Finding, printable_session, shorten
from seriatim.errors import render_screen
from seriatim.kafka.retention import format_duration

FINDINGS_LISTED_MAX = 20
SECTIONS_PER_KIND_MAX = 50
"""Of each kind: a mail of megabytes is taken by no server."""
FOR_EVER_SECONDS = 100 * 365 * 86_400
"""A topic may be kept for as long as a number can say: no calendar has that day."""
SUBJECT_MAX = 150
MAIL_STYLE = "font-family:sans-serif;font-size:14px;color:#222"
NO_CALLBACK = "Airflow called no callback: it was probably marked failed by hand"
SectionFacts = dict[str, str]


class MailSection(Struct, frozen=True):
    """A headline and its facts."""

    headline: str
    facts: SectionFacts


class MailContext(Struct, frozen=True, kw_only=True):
    """Where a stream is looked at and repaired."""

    stream: str
    to: tuple[str, ...] | None
    """None: the stream file cannot be read; whoever it named before is told."""
    airflow_url: str = ""
    report_url: str = ""
    """The last report of the stream, if there is one."""

    def airflow_link(self, path: str) -> str:
        """A page of Airflow's; empty without one."""
        return f"{self.airflow_url.rstrip('/')}/{path}" if self.airflow_url else ""


def compose_mail(alert: Alert, context: MailContext, at_seconds: float) -> Mail:
    """The mail of an alert."""
    sections = _sections(alert, context, at_seconds)
    subject = shorten(
        f"[seriatim] {context.stream}: {_subject(alert)}".replace("\n", " "), SUBJECT_MAX
    )
    links = {label: url for label, url in _links(alert, context).items() if url}
    text = "\n\n".join(
        [
            _opening(alert, context),
            *(render_screen(one.headline, {**one.facts}) for one in sections),
        ]
    )
    text += "".join(f"\n{label:<9}{url}" for label, url in {"": "", **links}.items())
    html = _html(_opening(alert, context), sections, links)
    digest = hashlib.sha256(f"{context.stream}\n{at_seconds}\n{text}".encode()).hexdigest()[:24]
    return Mail(
        id=digest,
        to=context.to or (),
        subject=subject,
        text=text + "\n",
        html=html,
        at_seconds=at_seconds,
    )


def _subject(alert: Alert) -> str:
    """The most urgent thing first, and how much more there is."""
    if alert.findings:
        first, more = alert.findings[0], len(alert.findings) - 1
        at = f" at offset {first.offset}" if first.offset >= 0 else ""
        return (
            f"{FINDING_TITLES[first.finding]} in {first.partition_name or 'the records table'}{at}"
            + (f" and {more} more" * (more > 0))
        )
    if alert.new_concerns and not (alert.failed_runs and alert.new_concerns[0].kind == "trouble"):
        return f"{alert.new_concerns[0].key}: {alert.new_concerns[0].text}"
    if alert.failed_runs:
        return f"run failed: {_headline(alert.failed_runs[-1])}"
    if alert.reminded_incidents:
        return f"still open: {', '.join(one.concern.key for one in alert.reminded_incidents)}"
    if alert.recovered_runs:
        return f"over: run failed: {_headline(alert.recovered_runs[-1])}"
    return f"over: {', '.join(one.concern.key for one in alert.closed_incidents)}"


def _opening(alert: Alert, context: MailContext) -> str:
    said = []
    if alert.failed_runs:
        said.append(
            f"{len(alert.failed_runs)} runs failed"
            if len(alert.failed_runs) > 1
            else "a run failed"
        )
    if alert.recovered_runs:
        said.append("a run failed, and a later one went well")
    if alert.findings:
        said.append(f"{len(alert.findings)} new finding{'s' * (len(alert.findings) > 1)}")
    if alert.new_concerns:
        said.append(
            f"{len(alert.new_concerns)} thing{'s' * (len(alert.new_concerns) > 1)} to look at"
        )
    if alert.reminded_incidents:
        said.append(f"{len(alert.reminded_incidents)} still open")
    if alert.closed_incidents:
        said.append(
            f"{len(alert.closed_incidents)} over, nothing to do about {'them' if len(alert.closed_incidents) > 1 else 'it'}"
        )
    return f"Stream {context.stream}: {', '.join(said)}."


def _sections(alert: Alert, context: MailContext, at_seconds: float) -> list[MailSection]:
    shown = alert.findings[:FINDINGS_LISTED_MAX]
    made = [_finding_section(one, context, at_seconds) for one in shown]
    if len(alert.findings) > len(shown):
        more = f"{len(alert.findings) - len(shown)} more findings"
        made.append(MailSection(more, {"next": f"seriatim status {context.stream}"}))
    told = ("halted", "quarantine") if alert.findings else ()
    rooms = (
        [
            _failed_run_section(one, context, is_reported=bool(alert.findings))
            for one in alert.failed_runs
        ],
        [
            _failed_run_section(one, context, is_reported=True, prefix="Over: run failed")
            for one in alert.recovered_runs
        ],
        [_concern_section(one) for one in alert.new_concerns if one.kind not in told],
        [_incident_section(one, "still open", at_seconds) for one in alert.reminded_incidents],
        [_incident_section(one, "over", at_seconds) for one in alert.closed_incidents],
    )
    for room in rooms:
        made += room[:SECTIONS_PER_KIND_MAX]
        if (rest := len(room) - SECTIONS_PER_KIND_MAX) > 0:
            made.append(
                MailSection(
                    f"{rest} more of this kind", {"next": f"seriatim status {context.stream}"}
                )
            )
    return made


def _finding_section(finding: Finding, context: MailContext, at_seconds: float) -> MailSection:
    at = f" at offset {finding.offset}" if finding.offset >= 0 else ""
    session = "" if finding.session is None else f" (session {printable_session(finding.session)})"
    where = finding.partition_name or "records table"
    facts = {
        "expected": finding.expected,
        "found": finding.found,
        "cause": finding.cause,
        "touched": finding.touched,
        "time left": _describe_time_left(finding.time_left_seconds, at_seconds),
        "next": finding.advice(context.stream),
        "in Airflow": _repair_link(finding, context),
    }
    headline = f"{FINDING_TITLES[finding.finding]}: {context.stream} {where}: {finding.finding}{at}{session}"
    return MailSection(
        headline, {label: shorten(fact, 800) for label, fact in facts.items() if fact}
    )


def _describe_time_left(seconds: int | None, at_seconds: float) -> str:
    if seconds is None or seconds > FOR_EVER_SECONDS:
        return ""
    return f"{format_duration(seconds)}: Kafka drops data that waits from {format_time(at_seconds + seconds)} on"


def _repair_link(finding: Finding, context: MailContext) -> str:
    """The repair DAG, with the values to paste: its form cannot be filled in by a link."""
    link = context.airflow_link("dags/seriatim_repair")
    if not link:
        return ""
    values = {"stream": context.stream} | (
        {"partition": finding.partition_name} if finding.partition >= 0 else {}
    )
    values |= {} if finding.session is None else {"session": finding.session}
    more = ", or with forward checked to go on without it" if finding.can_go_forward else ""
    return f"{link} and paste {msgspec.json.encode(values).decode()}{more}"


def _failed_run_section(
    failed_run: Note, context: MailContext, *, is_reported: bool, prefix: str = "Run failed"
) -> MailSection:
    _, _, rest = failed_run.text.partition("\n")
    run = f"{failed_run.run} ({NO_CALLBACK})" if failed_run.inferred else failed_run.run
    facts = {
        "task": failed_run.task,
        "run": run,
        "said": "" if is_reported else shorten(rest.strip("\n"), 2000),
    }
    if not is_reported and not failed_run.next:
        facts["next"] = f"read the task's log, then: seriatim status {context.stream}"
    return MailSection(f"{prefix}: {_headline(failed_run)}", facts)


def _headline(failed_run: Note) -> str:
    return shorten(failed_run.text.partition("\n")[0]) or "the scheduler gave no reason"


def _concern_section(concern: Concern) -> MailSection:
    return MailSection(concern.key, {"what": shorten(concern.text, 800), "next": concern.next})


def _incident_section(incident: Incident, prefix: str, at_seconds: float) -> MailSection:
    concern = incident.concern
    lasted = format_duration(max(0.0, at_seconds - incident.since_seconds))
    facts = {
        "what": shorten(concern.text, 800),
        "since": f"{format_time(incident.since_seconds)}, {lasted}",
    }
    if prefix != "over":
        facts["next"] = concern.next
    name = {RUN: "runs fail", REPAIR: "a repair failed"}.get(concern.kind, concern.key)
    return MailSection(f"{prefix}: {name}", facts)


def _links(alert: Alert, context: MailContext) -> dict[str, str]:
    links = dict(runs[-1].links) if (runs := [*alert.recovered_runs, *alert.failed_runs]) else {}
    report = context.report_url if runs or alert.findings else ""
    return {
        **links,
        "stream": context.airflow_link(f"dags/{quote(context.stream)}"),
        "report": report,
    }


def format_time(seconds: float) -> str:
    """A moment as people read it."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _html(opening: str, sections: list[MailSection], links: dict[str, str]) -> str:
    parts = [f'<div style="{MAIL_STYLE}"><p><b>{escape(opening)}</b></p>']
    for one in sections:
        rows = "".join(
            f'<tr><td style="color:#666;padding-right:12px;vertical-align:top">{escape(label)}</td>'
            f'<td style="white-space:pre-wrap">{escape(fact)}</td></tr>'
            for label, fact in one.facts.items()
            if fact
        )
        parts.append(
            f'<h4 style="margin-bottom:4px">{escape(one.headline)}</h4><table>{rows}</table>'
        )
    parts.append(
        "".join(
            f'<p><a href="{escape(url)}">{escape(label)}</a></p>' for label, url in links.items()
        )
    )
    return "".join(parts) + "</div>"
