"""Mails: an alert as a person reads it, in text and in HTML. Pure; nothing in it is fetched from elsewhere.

Every mail says the stream, what happened, what is touched, how long there is, and what to type next.

Next room: core/alert.py decides what is news; adapters/mail.py sends it.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from html import escape
from urllib.parse import quote

import msgspec
from msgspec import Struct

from seriatim.core.alert import REPAIR, RUN, Alert, Concern, Incident, Mail, Note
from seriatim.core.errors import screen
from seriatim.core.integrity import TITLES, Finding, named, shortened
from seriatim.core.retention import duration

FINDINGS_SHOWN_MAX = 20
THINGS_SHOWN_MAX = 50
"""Of each kind: a mail of megabytes is taken by no server."""
FOR_EVER_SECONDS = 100 * 365 * 86_400
"""A topic may be kept for as long as a number can say: no calendar has that day."""
SUBJECT_MAX = 150
STYLE = "font-family:sans-serif;font-size:14px;color:#222"
NO_CALLBACK = "Airflow called no callback: it was probably marked failed by hand"
Facts = dict[str, str]


class Section(Struct, frozen=True):
    """A headline and its facts."""

    headline: str
    facts: Facts


class Place(Struct, frozen=True, kw_only=True):
    """Where a stream is looked at and repaired."""

    stream: str
    to: tuple[str, ...] | None
    """None: the stream file cannot be read; whoever it named before is told."""
    airflow_url: str = ""
    report: str = ""
    """The last report of the stream, if there is one."""

    def link(self, path: str) -> str:
        """A page of Airflow's; empty without one."""
        return f"{self.airflow_url.rstrip('/')}/{path}" if self.airflow_url else ""


def compose(alert: Alert, place: Place, at_seconds: float) -> Mail:
    """The mail of an alert."""
    sections = _sections(alert, place, at_seconds)
    subject = shortened(f"[seriatim] {place.stream}: {_subject(alert)}".replace("\n", " "), SUBJECT_MAX)
    links = {label: url for label, url in _links(alert, place).items() if url}
    text = "\n\n".join([_opening(alert, place), *(screen(one.headline, {**one.facts}) for one in sections)])
    text += "".join(f"\n{label:<9}{url}" for label, url in {"": "", **links}.items())
    html = _html(_opening(alert, place), sections, links)
    digest = hashlib.sha256(f"{place.stream}\n{at_seconds}\n{text}".encode()).hexdigest()[:24]
    return Mail(id=digest, to=place.to or (), subject=subject, text=text + "\n", html=html, at_seconds=at_seconds)


def _subject(alert: Alert) -> str:
    """The most urgent thing first, and how much more there is."""
    if alert.findings:
        first, more = alert.findings[0], len(alert.findings) - 1
        at = f" at offset {first.offset}" if first.offset >= 0 else ""
        return f"{TITLES[first.finding]} in {first.place or 'the records table'}{at}" + (
            f" and {more} more" * (more > 0)
        )
    if alert.new and not (alert.failed and alert.new[0].concern == "trouble"):
        return f"{alert.new[0].key}: {alert.new[0].text}"
    if alert.failed:
        return f"run failed: {_headline(alert.failed[-1])}"
    if alert.reminded:
        return f"still open: {', '.join(one.concern.key for one in alert.reminded)}"
    if alert.passed:
        return f"over: run failed: {_headline(alert.passed[-1])}"
    return f"over: {', '.join(one.concern.key for one in alert.over)}"


def _opening(alert: Alert, place: Place) -> str:
    said = []
    if alert.failed:
        said.append(f"{len(alert.failed)} runs failed" if len(alert.failed) > 1 else "a run failed")
    if alert.passed:
        said.append("a run failed, and a later one went well")
    if alert.findings:
        said.append(f"{len(alert.findings)} new finding{'s' * (len(alert.findings) > 1)}")
    if alert.new:
        said.append(f"{len(alert.new)} thing{'s' * (len(alert.new) > 1)} to look at")
    if alert.reminded:
        said.append(f"{len(alert.reminded)} still open")
    if alert.over:
        said.append(f"{len(alert.over)} over, nothing to do about {'them' if len(alert.over) > 1 else 'it'}")
    return f"Stream {place.stream}: {', '.join(said)}."


def _sections(alert: Alert, place: Place, at_seconds: float) -> list[Section]:
    shown = alert.findings[:FINDINGS_SHOWN_MAX]
    made = [_finding(one, place, at_seconds) for one in shown]
    if len(alert.findings) > len(shown):
        more = f"{len(alert.findings) - len(shown)} more findings"
        made.append(Section(more, {"next": f"seriatim status {place.stream}"}))
    told = ("halted", "quarantine") if alert.findings else ()
    rooms = (
        [_failure(one, place, told=bool(alert.findings)) for one in alert.failed],
        [_failure(one, place, told=True, word="Over: run failed") for one in alert.passed],
        [_concern(one) for one in alert.new if one.concern not in told],
        [_open(one, "still open", at_seconds) for one in alert.reminded],
        [_open(one, "over", at_seconds) for one in alert.over],
    )
    for room in rooms:
        made += room[:THINGS_SHOWN_MAX]
        if (rest := len(room) - THINGS_SHOWN_MAX) > 0:
            made.append(Section(f"{rest} more of this kind", {"next": f"seriatim status {place.stream}"}))
    return made


def _finding(finding: Finding, place: Place, at_seconds: float) -> Section:
    at = f" at offset {finding.offset}" if finding.offset >= 0 else ""
    session = "" if finding.session is None else f" (session {named(finding.session)})"
    where = finding.place or "records table"
    facts = {
        "expected": finding.expected,
        "found": finding.found,
        "cause": finding.cause,
        "touched": finding.touched,
        "time left": _time_left(finding.time_left_seconds, at_seconds),
        "next": finding.next(place.stream),
        "in Airflow": _repair(finding, place),
    }
    headline = f"{TITLES[finding.finding]}: {place.stream} {where}: {finding.finding}{at}{session}"
    return Section(headline, {label: shortened(fact, 800) for label, fact in facts.items() if fact})


def _time_left(seconds: int | None, at_seconds: float) -> str:
    if seconds is None or seconds > FOR_EVER_SECONDS:
        return ""
    return f"{duration(seconds)}: Kafka drops data that waits from {when(at_seconds + seconds)} on"


def _repair(finding: Finding, place: Place) -> str:
    """The repair DAG, with the values to paste: its form cannot be filled in by a link."""
    link = place.link("dags/seriatim_repair")
    if not link:
        return ""
    values = {"stream": place.stream} | ({"partition": finding.place} if finding.partition >= 0 else {})
    values |= {} if finding.session is None else {"session": finding.session}
    more = ", or with forward checked to go on without it" if finding.can_go_forward else ""
    return f"{link} and paste {msgspec.json.encode(values).decode()}{more}"


def _failure(failed: Note, place: Place, *, told: bool, word: str = "Run failed") -> Section:
    _, _, rest = failed.text.partition("\n")
    run = f"{failed.run} ({NO_CALLBACK})" if failed.inferred else failed.run
    facts = {"task": failed.task, "run": run, "said": "" if told else shortened(rest.strip("\n"), 2000)}
    if not told and not failed.next:
        facts["next"] = f"read the task's log, then: seriatim status {place.stream}"
    return Section(f"{word}: {_headline(failed)}", facts)


def _headline(failed: Note) -> str:
    return shortened(failed.text.partition("\n")[0]) or "the scheduler gave no reason"


def _concern(concern: Concern) -> Section:
    return Section(concern.key, {"what": shortened(concern.text, 800), "next": concern.next})


def _open(incident: Incident, word: str, at_seconds: float) -> Section:
    concern = incident.concern
    lasted = duration(max(0.0, at_seconds - incident.since_seconds))
    facts = {"what": shortened(concern.text, 800), "since": f"{when(incident.since_seconds)}, {lasted}"}
    if word != "over":
        facts["next"] = concern.next
    name = {RUN: "runs fail", REPAIR: "a repair failed"}.get(concern.concern, concern.key)
    return Section(f"{word}: {name}", facts)


def _links(alert: Alert, place: Place) -> dict[str, str]:
    links = dict(runs[-1].links) if (runs := [*alert.passed, *alert.failed]) else {}
    report = place.report if runs or alert.findings else ""
    return {**links, "stream": place.link(f"dags/{quote(place.stream)}"), "report": report}


def when(seconds: float) -> str:
    """A moment as people read it."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _html(opening: str, sections: list[Section], links: dict[str, str]) -> str:
    parts = [f'<div style="{STYLE}"><p><b>{escape(opening)}</b></p>']
    for one in sections:
        rows = "".join(
            f'<tr><td style="color:#666;padding-right:12px;vertical-align:top">{escape(label)}</td>'
            f'<td style="white-space:pre-wrap">{escape(fact)}</td></tr>'
            for label, fact in one.facts.items()
            if fact
        )
        parts.append(f'<h4 style="margin-bottom:4px">{escape(one.headline)}</h4><table>{rows}</table>')
    parts.append("".join(f'<p><a href="{escape(url)}">{escape(label)}</a></p>' for label, url in links.items()))
    return "".join(parts) + "</div>"
