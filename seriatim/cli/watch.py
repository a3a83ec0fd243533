"""`seriatim watch`: look at streams again and again, and report what needs a person.

Next: operations/watch.py assesses a stream; alerts/alert.py sends the mails.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from time import sleep
from typing import Annotated

import typer
from msgspec.structs import replace

from seriatim import clock, config, context, stream_files
from seriatim.alerts.alert import (
    Notifier,
    Outbox,
    SendResult,
    observe_failure,
    observe_stream,
    send_alerts,
    send_waiting_mails,
)
from seriatim.alerts.incidents import Observation, OutboxChangedError, StoredState
from seriatim.alerts.mail import MailContext
from seriatim.cli import JsonObject, Options, as_seriatim_error, print_json, print_notice
from seriatim.cli.options import Json, stream_names
from seriatim.config import Settings
from seriatim.engine.findings import count_of, format_duration, format_iso_moment
from seriatim.errors import ConfigError, IntegrityError, PlatformError, SeriatimError
from seriatim.kafka.log import KafkaLog
from seriatim.operations.missing_messages import MissingMessageSearch
from seriatim.operations.report import REPORTS, report_sequence
from seriatim.operations.status import StreamStatus
from seriatim.stream import AlertSettings
from seriatim.stream_files import StreamFile
from seriatim.web import address
from seriatim.web.write_status import watch_stream_file, write_status_file

INTERRUPTED = 130
LOOKS_MAX = 5
"""How often a round looks at one stream at most. It looks again if another watch was faster."""
LONG_SECONDS = 10.0
HURRIED_SECONDS = 3.0
"""If a broker kept one look waiting for LONG_SECONDS in vain, the other looks of the round wait only
HURRIED_SECONDS for it.
"""


def watch(
    stream: Annotated[
        str | None,
        typer.Argument(metavar="STREAM", help="A name in streams/, or a path. Default: all."),
    ] = None,
    every: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="The time between two looks.")
    ] = 60.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once and exit, for example from cron.")
    ] = False,
    mail: Annotated[
        bool,
        typer.Option(
            help="Send mails to alerts.to of the stream files. With --no-mail nothing is sent."
        ),
    ] = True,
    json: Json = False,
) -> None:
    """Report lag, time left, and what needs a person.

    What needs a person: halts, quarantine, missing runs, data that is about to expire. The command
    looks until Ctrl-C. A stream that cannot be looked at is reported, and looked at again. With
    --once the exit code is the result: 0 if all is well, 3 if something needs a person. If a stream
    could not be looked at, or a mail could not be sent, it is 1, 2 or 4, even if something else
    needs a person. A new incident is mailed to alerts.to, again after alerts.remind_hours, and once
    when it is over.

    Example: seriatim watch --once --json
    """
    settings = config.load_settings()
    if once:
        exit_code = _watch_all(stream, settings, mail=mail, json=json)
        if exit_code:
            raise typer.Exit(exit_code)
        return
    try:
        while True:
            _watch_all(stream, settings, mail=mail, json=json)
            sleep(every)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _watch_all(stream: str | None, settings: Settings, *, mail: bool, json: bool) -> int:
    """Look at every stream once; return one exit code for all.

    1. Send the mails that wait since earlier rounds, since a look may take long.
    2. Look at each stream. The error of one stream does not hide the others.
    """
    names = stream_names(stream)
    watch_round = WatchRound(settings, json=json)
    exit_codes = []
    # 1. Send the mails that wait.
    if mail:
        for name in names:
            with suppress(Exception):  # step 2 meets the same error, and reports it
                exit_codes.append(watch_round.send_waiting_mails(name))
    # 2. Look.
    for name in names:
        try:
            exit_codes.append(watch_round.watch_stream(name, mail=mail))
        except Exception as error:
            if Options.debug:
                raise
            seriatim_error = as_seriatim_error(error)
            _print_stream_error(name, seriatim_error, json=json)
            exit_codes.append(seriatim_error.exit_code)
    return gravest_exit_code(exit_codes)


def gravest_exit_code(codes: Sequence[int]) -> int:
    """One exit code for all looks of a round.

    What needs a person (3) was mailed. So an error that prevented a look or a mail comes first.
    """
    error_codes = set(codes) - {0, IntegrityError.exit_code}
    if error_codes:
        return min(error_codes)
    return max(codes)


class WatchRound:
    """One look at each stream, one after the other.

    A broker or a mail server that does not answer makes the whole round wait only once.
    """

    def __init__(self, settings: Settings, *, json: bool) -> None:
        self.settings = settings
        self.json = json
        self.is_hurried = False
        """Whether the broker kept an earlier look of this round waiting in vain."""
        self.printed_names: set[str] = set()
        """Streams whose result was printed. A second look at one is not printed."""

    @cached_property
    def notifier(self) -> Notifier | None:
        """The mail server; None if there is none. It is shared by all streams of the round."""
        return context.notifier(self.settings)

    def send_waiting_mails(self, name: str) -> int:
        """Send the mails that wait since earlier rounds; 4 if some were given up, else 0."""
        outbox = context.outbox(name, self.settings)
        if not outbox.alert_state().mails:
            return 0
        recipients = None
        # A stream file that is wrong must not keep mails back: they have recipients of their own.
        with suppress(SeriatimError):
            file = stream_files.load_stream(name, self.settings.streams)
            recipients = file.stream.alerts.to
        now_seconds = clock.WallClock().now_seconds()
        send_result = send_waiting_mails(recipients, now_seconds, outbox, self.notifier)
        _print_sent(name, send_result, is_last_try=False)
        return PlatformError.exit_code if send_result.refused_mail_paths else 0

    def watch_stream(self, name: str, *, mail: bool) -> int:
        """Look at one stream, print the result, and mail it; return the exit code.

        If another watch stored what it decided in the meantime, the stream is looked at again: so no
        two watches mail the same incident, and none mails what was over before.
        """
        if not mail:
            stream_status = self._watch(stream_files.load_stream(name, self.settings.streams))
            _print_stream_status(stream_status, json=self.json)
            return _exit_code_of(stream_status)
        outbox = context.outbox(name, self.settings)
        for _ in range(LOOKS_MAX - 1):
            try:
                return self._watch_and_mail(name, outbox)
            except OutboxChangedError:
                continue
        return self._watch_and_mail(name, outbox)

    def _watch_and_mail(self, name: str, outbox: Outbox) -> int:
        """Look at one stream, print the result, and mail what is new; return the exit code.

        A failed look is mailed as well, and then raised.
        """
        file = None
        # The alert state is read before the look. Then a state that others store during it is noticed.
        seen = outbox.stored_state()
        try:
            file = stream_files.load_stream(name, self.settings.streams)
            stream_status = self._watch(file)
            observation = observe_stream(
                file.stream, stream_status, context.ledger(file), seen.alert_state
            )
        except SeriatimError as error:
            # A stream that nobody can look at is an incident, too.
            failure = observe_failure(error, clock.WallClock().now_seconds())
            self._send_alerts(name, file, None, failure, seen, outbox)
            raise
        if name not in self.printed_names:
            _print_stream_status(stream_status, json=self.json)
            self.printed_names.add(name)
        if self._send_alerts(name, file, stream_status, observation, seen, outbox):
            return PlatformError.exit_code
        return _exit_code_of(stream_status)

    def _watch(self, file: StreamFile) -> StreamStatus:
        """Ask Kafka and the ledger, assess the answers, and write the status file."""
        began_seconds = time.monotonic()
        try:
            log = self._open_log(file)
            search = MissingMessageSearch(context.ConnectedStream(file, self.settings))
            stream_status = watch_stream_file(
                file,
                log,
                context.ledger(file),
                context.state(file),
                clock.WallClock(),
                search=search,
            )
        except PlatformError:
            if time.monotonic() - began_seconds >= LONG_SECONDS:
                self.is_hurried = True
            raise
        if stream_status.concerns:
            # Only a mail about a problem says what is published, so other looks save the requests.
            # A table `current` that cannot be read hides nothing else of the status.
            with suppress(OSError, SeriatimError):
                published = context.table_sequences(file)["published"]
                stream_status = replace(stream_status, published=published)
        try:
            write_status_file(file, stream_status)
        except (OSError, ConfigError, PlatformError) as error:
            # A user who only watches may have no right to write there.
            print_notice(
                f"{file.stream.name}: the status file could not be written: {error}", status=None
            )
        return stream_status

    def _runbook_url(self) -> str:
        """The page with the runbook; empty if there is no Airflow."""
        if not self.settings.airflow_url:
            return ""
        return address.runbook_url(self.settings.airflow_url)

    def _open_log(self, file: StreamFile) -> KafkaLog:
        if self.is_hurried:
            return context.log(file, self.settings, HURRIED_SECONDS)
        return context.log(file, self.settings)

    def _send_alerts(
        self,
        name: str,
        file: StreamFile | None,
        stream_status: StreamStatus | None,
        observation: Observation,
        seen: StoredState,
        outbox: Outbox,
    ) -> bool:
        """Mail what is new and what waits since earlier; whether any mail could not be sent.

        `file` is None if the stream file itself is wrong, and `stream_status` if the stream could
        not be read.
        """
        alert_settings = AlertSettings()
        stream_name = name
        recipients = None
        report_url = ""
        stops_at_open_circuit = False
        if file is not None:
            alert_settings = file.stream.alerts
            stream_name = file.stream.name
            recipients = alert_settings.to
            report_url = _last_report_url(file, self.settings)
            stops_at_open_circuit = file.stream.on_check_failure == "stop"
        mail_context = MailContext(
            stream=stream_name,
            to=recipients,
            airflow_url=self.settings.airflow_url,
            report_url=report_url,
            timezone=alert_settings.timezone,
            runbook_url=self._runbook_url(),
            where_to_type=self.settings.where_to_type,
            stops_at_open_circuit=stops_at_open_circuit,
            status=stream_status,
        )
        send_result = send_alerts(
            mail_context, alert_settings.remind_hours, observation, seen, outbox, self.notifier
        )
        _print_sent(name, send_result)
        return bool(send_result.waiting_mails or send_result.refused_mail_paths)


def _exit_code_of(stream_status: StreamStatus) -> int:
    return IntegrityError.exit_code if stream_status.concerns else 0


def _print_sent(name: str, send_result: SendResult, *, is_last_try: bool = True) -> None:
    """Print which mails were sent, which were given up, and after the last try which wait."""
    for mail in send_result.sent_mails:
        print_notice(f"{name}: mailed to {', '.join(mail.to)}: {mail.subject}", mailed=mail.subject)
    for path in send_result.refused_mail_paths:
        print_notice(
            f"{name}: a mail was refused for two days and is not tried any more;"
            f" it is kept as {path}",
            aside=path,
        )
    if send_result.trouble and is_last_try:
        waiting_count = len(send_result.waiting_mails)
        text = "not all mails were sent"
        if waiting_count:
            waits = "waits" if waiting_count == 1 else "wait"
            text = f"{count_of(waiting_count, 'mail')} {waits} in the outbox"
        print_notice(
            f"{name}: {text}: {send_result.trouble}; the next look tries again",
            waiting=waiting_count,
        )


def _last_report_url(file: StreamFile, settings: Settings) -> str:
    """The address of the last run's report: in Airflow if there is one, else on this host.

    Empty if there is no report yet.
    """
    store = context.output_store(file)
    reports = []
    for key, _ in store.keys(REPORTS):
        sequence = report_sequence(key)
        if sequence is not None:
            reports.append((sequence, key))
    if not reports:
        return ""
    last_sequence, last_report = max(reports)
    if settings.airflow_url and Path(file.folder) == settings.streams:
        return address.report_url(settings.airflow_url, file.stream.name, last_sequence)
    return store.uri(last_report)


def _print_stream_status(stream_status: StreamStatus, *, json: bool) -> None:
    """Print one line for the stream, and the concerns with what to do. Terminals get colours."""
    if json:
        print_json(_json_values(stream_status))
        return
    time = format_iso_moment(stream_status.at_seconds or 0.0)
    facts = [
        f"{time} {stream_status.stream}: {stream_status.verdict_text}",
        count_of(len(stream_status.partitions), "partition"),
        f"lag {stream_status.unread}",
        _describe_time_left(stream_status),
    ]
    color = typer.colors.YELLOW if stream_status.concerns else typer.colors.GREEN
    typer.secho(" · ".join(facts), fg=color)
    for concern in stream_status.concerns:
        location = f" {concern.location}" if concern.location else ""
        typer.secho(f"  {concern.kind}{location}: {concern.text}", fg=typer.colors.RED)
        _print_next_lines(concern.next)


def _json_values(stream_status: StreamStatus) -> JsonObject:
    """A look at a stream as plain values. The keys are fixed, because people script against them."""
    nearest = stream_status.nearest
    return {
        "stream": stream_status.stream,
        "at_seconds": stream_status.at_seconds,
        "verdict": stream_status.verdict,
        "partitions": len(stream_status.partitions),
        "lag": stream_status.unread,
        "time_left_seconds": nearest and nearest.time_left_seconds,
        "nearest": nearest and nearest.partition_name,
        "catches_up": stream_status.catches_up,
        "quarantined": stream_status.quarantined_count,
        "time_left_by_partition": stream_status.time_left_by_partition,
        "concerns": stream_status.concerns,
    }


def _describe_time_left(stream_status: StreamStatus) -> str:
    nearest = stream_status.nearest
    if nearest is None or nearest.time_left_seconds is None:
        return "no message is in danger"
    duration = format_duration(nearest.time_left_seconds)
    text = f"time left {duration} ({nearest.partition_name})"
    if stream_status.catches_up is None:
        return text
    return text + (", catches up" if stream_status.catches_up else ", would not catch up")


def _print_stream_error(name: str, error: SeriatimError, *, json: bool) -> None:
    if json:
        print_json(
            {"stream": name, "error": error.title, "message": error.message, "next": error.next}
        )
        return
    now = format_iso_moment(time.time())
    typer.secho(f"{now} {name}: {error.title}: {error.message}", fg=typer.colors.RED)
    _print_next_lines(error.next)


def _print_next_lines(advice: str) -> None:
    for line in advice.splitlines():
        typer.echo(f"    → {line}")
