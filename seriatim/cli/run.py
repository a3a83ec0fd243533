"""`seriatim run` and `seriatim plan`: fold a stream up to the log ends, or show what would be done.

Next: operations/run.py folds; cli/output.py prints the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer

from seriatim import clock, config, context, stream_files
from seriatim.cli import (
    CommandResult,
    JsonObject,
    Options,
    as_seriatim_error,
    print_error,
    print_notice,
    print_result,
    report,
)
from seriatim.cli.check import check_and_report
from seriatim.cli.lookback import check_session_name
from seriatim.cli.options import AllFindings, Json, StreamName, load_stream
from seriatim.cli.output import (
    RunProgress,
    errors_among,
    exit_on_signal,
    print_derived_error,
    print_findings,
    render_table,
)
from seriatim.cli.publish import publish_stream
from seriatim.context import ConnectedStream
from seriatim.engine.findings import Finding, count_of, new_findings_error
from seriatim.engine.offsets import OffsetByPartition, Partition
from seriatim.errors import (
    BrokenPromiseError,
    ConfigError,
    FencedError,
    IntegrityError,
    PlatformError,
    SeriatimError,
)
from seriatim.ledger.commit import read_head
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import refuse_open_circuit
from seriatim.operations.plan import SlicePlan, plan_run, ranges_to_read, select_ranges
from seriatim.operations.report_findings import mark_reported, unreported_findings
from seriatim.operations.retention import (
    ShortRetention,
    partition_clocks,
    short_retention,
    time_left_warnings,
    with_time_left,
)
from seriatim.operations.run import FoldRun, RunOutcome
from seriatim.operations.run_request import TRACED_SESSIONS_MAX
from seriatim.operations.status import quarantined_count
from seriatim.storage import traces
from seriatim.stream import Stream
from seriatim.stream_files import StreamFile
from seriatim.web.write_status import write_status_after_run

EXIT_CODES_BY_GRAVITY: dict[int, type[SeriatimError]] = {
    1: BrokenPromiseError,
    2: ConfigError,
    4: PlatformError,
    3: IntegrityError,
    5: FencedError,
}
"""When streams of one run end differently, the first of these decides how the command ends."""
UntilOffsets = Annotated[
    str,
    typer.Option(
        metavar="JSON",
        help='Stop at these offsets: {"topic": {"0": 1200}}. Other partitions are not read.',
    ),
]


def run(
    streams: Annotated[
        list[str],
        typer.Argument(
            metavar="STREAM...",
            help="Names of files in streams/, or paths to TOML files. Several share one Spark.",
        ),
    ],
    messages_max: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            min=1,
            help="Messages in one slice, but at least one message of each partition.",
        ),
    ] = None,
    until_offsets: UntilOffsets = "",
    check: Annotated[
        bool,
        typer.Option("--check", help="Then check what was committed, and publish what is checked."),
    ] = False,
    trace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SESSION",
            help="Write the trace of this session under traces/. It may be repeated.",
        ),
    ] = None,
    _all: AllFindings = False,
    _json: Json = False,
) -> None:
    """Fold a stream from its frontier to the current log ends.

    It folds slice by slice. The run can be killed anywhere and started again. Exit codes: 0 done, 2
    bad configuration, 3 new integrity finding, 4 platform trouble (try again), 5 another run moved
    the frontier, 130 and 143 stopped (Ctrl-C, SIGTERM). With --check a finding does not stop the
    steps after it, and with --json each step prints its own object.

    Several streams are folded one after the other by one Spark, each as if it were alone: one that
    fails does not stop the others. The exit code is then the first of 1, 2, 4, 3, 5 that occurred.

    Example: seriatim run demo --messages-max 500000
    """
    until = _parse_until_offsets(until_offsets) if until_offsets else None
    traced_sessions = _parse_traced_sessions(trace)
    run_one = _StreamRunner(messages_max, until, traced_sessions, check=check)
    if len(streams) == 1:
        run_one(load_stream(streams[0]))
        return
    if until is not None or traced_sessions:
        option = "--trace" if until is None else "--until-offsets"
        raise ConfigError(
            f"{option}: {count_of(len(streams), 'stream')} are named",
            next="run that stream by itself",
        )
    _run_streams(streams, run_one)


class _StreamRunner:
    """Runs streams one after the other: fold, and with `check` also check and publish."""

    def __init__(
        self,
        messages_max: int | None,
        until: OffsetByPartition | None,
        traced_sessions: tuple[str, ...],
        *,
        check: bool,
    ) -> None:
        self.messages_max = messages_max
        self.until = until
        self.traced_sessions = traced_sessions
        self.check = check
        self.streams: tuple[Stream, ...] = ()
        """All streams of the command, if there are several. They share one Spark."""
        self.spark_session: Any = None
        """The Spark that an earlier stream has started."""

    def __call__(self, file: StreamFile) -> None:
        """Run one stream."""
        steps: list[Callable[[], object]] = [lambda: self._fold(file)]
        if self.check:
            steps.append(lambda: print_result(check_and_report(file)))
            if stream_files.load_runner(file).row_key_spec is not None:
                steps.append(lambda: print_result(publish_stream(file)))
        _run_steps(steps)

    def _fold(self, file: StreamFile) -> None:
        # A machine that cannot be loaded is refused before the output folder is created.
        stream_files.load_runner(file)
        stream_files.refuse_unwritable_output(file, create=True)
        open_stream = context.open_for_fold(file, config.load_settings(), print_notice)
        spark = open_stream.spark
        spark.traced_sessions = self.traced_sessions
        spark.shared_with = self.streams
        spark.spark = self.spark_session
        try:
            _fold_stream(
                open_stream, self.messages_max or file.stream.slice.messages_max, self.until
            )
        finally:
            self.spark_session = spark.spark

    def end_spark(self, *, with_jvm: bool = False) -> None:
        """End Spark, if it runs. `with_jvm`: the next stream starts another one."""
        if self.spark_session is not None:
            context.end_spark_session(self.spark_session, with_jvm=with_jvm)
        self.spark_session = None


def _run_streams(names: Sequence[str], run_one: _StreamRunner) -> None:
    """Run several streams. Each error is printed when it occurs; then the command fails with the
    gravest.
    """
    files: dict[str, StreamFile] = {}
    errors: dict[str, SeriatimError] = {}
    for name in names:
        try:
            files[name] = load_stream(name)
        except SeriatimError as error:
            errors[name] = error
            print_error(error)
    run_one.streams = tuple(file.stream for file in files.values())
    for name, file in files.items():
        try:
            run_one(file)
        except Exception as error:
            if Options.debug:
                raise
            errors[name] = as_seriatim_error(error)
            print_error(errors[name])
            if errors[name].exit_code == PlatformError.exit_code:
                # It may be Spark itself that failed, so the next stream gets a new one.
                run_one.end_spark(with_jvm=True)
    run_one.end_spark()
    if errors:
        raise _gravest_error(errors, len(names))


def _gravest_error(errors: Mapping[str, SeriatimError], stream_count: int) -> SeriatimError:
    """The error with which a run of several streams ends."""
    by_exit_code = {error.exit_code: error for error in errors.values()}
    exit_code = next(code for code in EXIT_CODES_BY_GRAVITY if code in by_exit_code)
    ends = [f"{name} ended with exit code {error.exit_code}" for name, error in errors.items()]
    return EXIT_CODES_BY_GRAVITY[exit_code](
        f"{len(errors)} of {count_of(stream_count, 'stream')} failed: {', '.join(ends)}",
        next="read their errors above",
    )


def _run_steps(steps: Sequence[Callable[[], object]]) -> None:
    """Run every step, even if the data failed an earlier one, and then raise the first failure.

    Only an IntegrityError lets the next step run. Any other error ends the command at once.
    """
    failure: IntegrityError | None = None
    for step in steps:
        try:
            step()
        except IntegrityError as error:
            if failure is None:
                failure = error
            else:
                print_notice(error.render())
    if failure is not None:
        raise failure


def _fold_stream(
    open_stream: ConnectedStream, messages_max: int, until: OffsetByPartition | None
) -> None:
    """Fold a stream and print the outcome.

    1. Prepare the run. Findings of an earlier run that was killed are printed with this one's.
    2. Fold. However it ends, Spark is stopped, and findings are printed.
    3. Write the report and the status file.
    4. Print the outcome, and remember that its findings were reported.
    """
    # 1. Prepare.
    file = open_stream.file
    name = file.stream.name
    progress = RunProgress(name)
    head = read_head(open_stream.ledger, name)
    sequence_before = head.ledger.sequence if head else -1
    fold_run = FoldRun(open_stream, progress=progress, head=head)
    if head is not None:
        fold_run.outcome.findings += unreported_findings(open_stream.ledger, name, head)
    # 2. Fold. This commits slice by slice; nothing after it can undo a commit.
    outcome = _run_until_stopped(open_stream, fold_run, progress, messages_max, until)
    outcome.findings = findings_with_time_left(fold_run)
    # 3. Write the report and the status file.
    report.write_run_report(file, sequence_before, outcome.sequence, open_stream.ledger)
    _write_status(open_stream, fold_run.head)
    # 4. Print.
    try:
        print_outcome(name, outcome)
    finally:
        # Findings raise after they were printed. They count as reported nevertheless.
        mark_reported(open_stream.ledger, outcome.sequence)


def _run_until_stopped(
    open_stream: ConnectedStream,
    fold_run: FoldRun,
    progress: RunProgress,
    messages_max: int,
    until: OffsetByPartition | None,
) -> RunOutcome:
    """Run a fold. If an error or a signal ends it, findings of committed slices are printed."""
    spark = open_stream.spark

    def print_findings_and_kill_spark() -> None:
        progress.close()
        print_findings_of_run(fold_run)
        spark.kill()

    with (
        exit_on_signal(open_stream.stream.name, print_findings_and_kill_spark),
        _prune_traces_afterwards(open_stream.file, spark.traced_sessions),
    ):
        try:
            return fold_run.run(messages_max, until)
        except BaseException:
            # Slices before this one are committed, so their findings must not get lost with the
            # error, whatever it is.
            progress.close()
            print_findings_of_run(fold_run)
            raise
        finally:
            progress.close()
            spark.stop()


def _write_status(open_stream: ConnectedStream, head: LedgerHead) -> None:
    trouble = write_status_after_run(
        open_stream.file,
        open_stream.log,
        open_stream.ledger,
        open_stream.open_state(),
        open_stream.clock,
        open_stream.derived,
        head,
    )
    if trouble:
        print_notice(
            f"{open_stream.stream.name}: the status file could not be written: {trouble}",
            status=None,
        )


def _parse_traced_sessions(session_names: list[str] | None) -> tuple[str, ...]:
    """The sessions to trace beside the fold, each once. Too many are refused."""
    for name in session_names or ():
        check_session_name(name)
    names = tuple(dict.fromkeys(session_names or ()))
    if len(names) > TRACED_SESSIONS_MAX:
        raise ConfigError(
            f"--trace: {count_of(len(names), 'session')}",
            next=f"trace at most {TRACED_SESSIONS_MAX} at a time",
        )
    return names


@contextmanager
def _prune_traces_afterwards(file: StreamFile, trace: tuple[str, ...]) -> Iterator[None]:
    """Delete old traces at the end of a traced run, also if it failed."""
    try:
        yield
    finally:
        if trace:
            _prune_traces(file)


def _prune_traces(file: StreamFile) -> None:
    """Delete the oldest traces, and print where the traces are."""
    name = file.stream.name
    folder = f"{file.stream.output.path}/traces"
    try:
        traces.prune(context.output_store(file))
    except (OSError, SeriatimError) as error:  # that undoes no commit, so it is a notice only
        print_notice(f"{name}: old traces could not be deleted: {error}; look at {folder}")
    print_notice(f"{name}: traces are in {folder}")


def findings_with_time_left(fold_run: FoldRun) -> list[Finding]:
    """A run's findings with the time left to act, and warnings where that time is short."""
    stream = fold_run.stream
    ledger = fold_run.head.ledger
    log = fold_run.open_stream.log
    try:
        bounds = log.bounds(stream.topics)
        clocks = partition_clocks(ledger, log, bounds, fold_run.open_stream.clock.now_seconds())
    except PlatformError as trouble:
        # The run is committed. A broker that does not answer now does not undo it.
        print_notice(f"{stream.name}: time left is not known: {trouble.message}")
        return fold_run.outcome.findings
    return [
        *with_time_left(fold_run.outcome.findings, clocks),
        *time_left_warnings(stream, ledger, clocks),
    ]


def print_findings_of_run(fold_run: FoldRun) -> None:
    """Print the findings of a run that ended early, and remember that they were reported."""
    print_findings(fold_run.stream.name, fold_run.outcome.findings)
    mark_reported(fold_run.open_stream.ledger, fold_run.head.ledger.sequence)


def plan(
    stream: StreamName,
    until_offsets: UntilOffsets = "",
    topic: Annotated[
        list[str] | None,
        typer.Option(help="Show the ranges of this topic. It may be repeated."),
    ] = None,
    partition: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC/NUMBER", help="Show the range of this partition. It may be repeated."
        ),
    ] = None,
    _json: Json = False,
) -> PlannedRun:
    """Show what the next run would do, and commit nothing.

    The plan has the ranges of each partition, new topics, and what waits. A topic or partition that
    the stream does not have is refused. Topics that keep messages for less than 72 hours are named
    in a warning.

    Example: seriatim plan demo
    """
    file = load_stream(stream)
    name = file.stream.name
    log = context.log(file, config.load_settings())
    ledger, slice_plan = plan_run(file.stream, log, context.ledger(file))
    partitions = [Partition.parse(text) for text in partition or ()]
    slice_plan.ranges = select_ranges(slice_plan, topic or (), partitions, name)
    if until_offsets:
        until = _parse_until_offsets(until_offsets)
        slice_plan.ranges = ranges_to_read(slice_plan, until, name)
    # A run would refuse these as well, so its plan does.
    context.refuse_machine_for_ledger(file, ledger)
    refuse_open_circuit(ledger, file.stream.on_check_failure)
    short_topics = short_retention(file.stream, log, ledger, clock.WallClock())
    if not Options.json:  # the JSON of the plan has them
        print_findings(name, slice_plan.findings)
    return PlannedRun(
        file.stream, ledger.sequence, slice_plan, short_topics, quarantined_count(ledger)
    )


class PlannedRun(CommandResult):
    """What the next run of a stream would do."""

    stream: Stream
    sequence: int
    slice_plan: SlicePlan
    short_topics: Sequence[ShortRetention]
    quarantined_count: int = 0
    """Sessions in quarantine. No run goes on with them, except at their next snapshot."""

    def to_json(self) -> JsonObject:
        """The plan, with one object for each range."""
        slice_plan = self.slice_plan
        return {
            "stream": self.stream.name,
            "sequence": self.sequence,
            "partitions": self._rows(),
            "waiting": [str(partition) for partition in slice_plan.waiting_partitions],
            "gone": [str(partition) for partition in slice_plan.missing_partitions],
            "findings": [finding.to_dict(self.stream.name) for finding in slice_plan.findings],
            "short_retention": list(self.short_topics),
            "messages": slice_plan.backlog,
        }

    def _rows(self) -> list[JsonObject]:
        return [
            {
                "topic": partition.topic,
                "partition": partition.number,
                "from": offset_range.start,
                "until": offset_range.end,
                "messages": len(offset_range),
                "new": partition in self.slice_plan.new_accounts,
            }
            for partition, offset_range in sorted(self.slice_plan.ranges.items())
        ]

    def _describe_backlog(self) -> str:
        backlog = self.slice_plan.backlog
        if backlog:
            slice_count = math.ceil(backlog / self.stream.slice.messages_max)
            return f"{count_of(backlog, 'message')} in about {count_of(slice_count, 'slice')}"
        if self.slice_plan.new_accounts:
            return "new partitions, without a message so far"
        return "nothing new"

    def render(self) -> str:
        """A table of the ranges, and what waits, is gone, or is not kept for long."""
        name = self.stream.name
        slice_plan = self.slice_plan
        lines = []
        if slice_plan.backlog or slice_plan.new_accounts:
            columns = ["topic", "partition", "from", "until", "messages", "new"]
            lines.append(render_table(self._rows(), columns))
        lines.append(f"{name}: {self._describe_backlog()}")
        if self.quarantined_count:
            sessions = count_of(self.quarantined_count, "session")
            lines.append(f"{name}: {sessions} in quarantine; `seriatim status {name}` says why")
        for partition in slice_plan.waiting_partitions:
            lines.append(
                f"{partition}: waits since an earlier run; `seriatim status {name}` says why"
            )
        for partition in slice_plan.missing_partitions:
            lines.append(f"{partition}: gone from Kafka or matched no more; its state is kept")
        for topic in self.short_topics:
            text = f"{topic.text}\n  → {topic.next}"
            lines.append(typer.style(text, fg=typer.colors.YELLOW))
        return "\n".join(lines)


def print_outcome(stream: str, outcome: RunOutcome) -> None:
    """Print what a run did: 1. findings, 2. notices about what a person should know, 3. the result.

    New findings are raised afterwards, so that the run fails.
    """
    print_findings(stream, outcome.findings)
    _print_outcome_notices(stream, outcome)
    print_result(FoldedStream(stream, outcome))


class FoldedStream(CommandResult):
    """What a run did."""

    stream: str
    outcome: RunOutcome

    def to_json(self) -> JsonObject:
        """The counts of the run."""
        outcome = self.outcome
        return {
            "stream": self.stream,
            "messages": outcome.messages,
            "records": outcome.records,
            "headless": outcome.headless,
            "slices": outcome.slices,
            "sequence": outcome.sequence,
            "findings": len(outcome.findings),
            "waiting": [str(partition) for partition, _ in outcome.earlier_halts],
            "quarantined": outcome.quarantined,
            "peak_memory_bytes": outcome.peak_memory_bytes,
        }

    def render(self) -> str:
        """One line."""
        outcome = self.outcome
        if not outcome.slices:
            return f"{self.stream}: nothing new"
        messages = count_of(outcome.messages, "message")
        if outcome.headless:
            messages += f", {outcome.headless} headless"
        records = count_of(outcome.records, "record")
        slices = count_of(outcome.slices, "slice")
        return (
            f"{self.stream}: {messages} → {records} in {slices}, ledger at entry {outcome.sequence}"
        )

    def error(self) -> SeriatimError | None:
        """New findings, or topics that are all gone."""
        errors = errors_among(self.outcome.findings)
        if errors:
            return new_findings_error(self.stream, errors)
        if self.outcome.missing_partitions and not self.outcome.matched_partitions:
            return ConfigError(
                f"{self.stream}: none of its topics is there any more",
                next="check `topics` in the stream file (it must match whole names)"
                " and the broker's address",
            )
        return None


def _print_outcome_notices(stream: str, outcome: RunOutcome) -> None:
    for partition, halt in outcome.earlier_halts:
        print_notice(
            f"{stream} {partition}: waits at offset {halt.offset} since entry {halt.sequence}:"
            f" {halt.finding}, {halt.cause}",
            waiting=str(partition),
            offset=halt.offset,
        )
    for partition in outcome.missing_partitions:
        print_notice(
            f"{stream} {partition}: gone from Kafka, or matched no more; its state is kept",
            gone=str(partition),
        )
    if outcome.quarantined:
        print_notice(
            f"{stream}: {count_of(outcome.quarantined, 'session')} in quarantine;"
            f" `seriatim status {stream}` says what helps",
            quarantined=outcome.quarantined,
        )
    if outcome.foreign_sequence >= 0:
        print_notice(
            f"{stream}: others wrote to the records table (reported by entry"
            f" {outcome.foreign_sequence}); `seriatim verify {stream}` says what differs",
            foreign=outcome.foreign_sequence,
        )
    print_derived_error(stream, outcome.derived_error)
    if outcome.snapshot_request_error:
        text = (
            f"{stream}: producers were not asked for the snapshots that sessions need;"
            " the next run asks again."
        )
        if not Options.json:
            text += f"\n{outcome.snapshot_request_error}"
        print_notice(text, unasked=outcome.snapshot_request_error)


def _parse_until_offsets(text: str) -> dict[Partition, int]:
    """Parse `{"topic": {"0": 1200}}`, as a person writes it. Negative offsets are refused."""
    until = {}
    try:
        ends_by_topic = msgspec.json.decode(text.encode(), type=dict[str, dict[str, int]])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"--until-offsets: {error}",
            allowed='{"topic": {"0": 1200}}',
            next="give offsets by topic and partition",
        ) from None
    for topic, ends in ends_by_topic.items():
        for number, end in ends.items():
            partition = Partition.parse(f"{topic}/{number}")
            if end < 0:
                raise ConfigError(
                    f"--until-offsets: {partition} has {end}", next="give offsets of 0 or more"
                )
            until[partition] = end
    return until
