"""`seriatim run` and `seriatim plan`: fold a stream up to the log ends, or show what would be done.

Next: operations/run.py folds; cli/output.py prints the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer

from seriatim import clock, config, context, stream_files
from seriatim.cli import Options, output, print_notice, report
from seriatim.cli.check import check_and_report
from seriatim.cli.lookback import check_session_name
from seriatim.cli.options import Json, StreamName
from seriatim.cli.output import RunProgress
from seriatim.cli.publish import publish_stream
from seriatim.cli.stop import exit_on_signal
from seriatim.config import Settings
from seriatim.context import ConnectedStream
from seriatim.engine.findings import Finding
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, IntegrityError, PlatformError
from seriatim.ledger.model import refuse_open_circuit
from seriatim.operations.plan import plan_run, ranges_to_read, select_ranges
from seriatim.operations.report_findings import last_sequence, mark_reported, unreported_findings
from seriatim.operations.retention import (
    partition_clocks,
    short_retention,
    time_left_warnings,
    with_time_left,
)
from seriatim.operations.run import FoldRun, RunOutcome
from seriatim.operations.run_request import TRACED_SESSIONS_MAX
from seriatim.storage import traces
from seriatim.storage.store import open_store
from seriatim.stream_files import StreamFile
from seriatim.web.write_status import write_status_after_run

UntilOffsets = Annotated[
    str,
    typer.Option(
        metavar="JSON",
        help='Stop at these offsets: {"topic": {"0": 1200}}. Other partitions are not read.',
    ),
]


def run(
    stream: StreamName,
    messages_max: Annotated[
        int | None,
        typer.Option(
            min=1, help="Messages in one slice, but at least one message of each partition."
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
    json: Json = False,
) -> None:
    """Fold a stream from its frontier to the current log ends.

    It folds slice by slice. The run can be killed anywhere and started again. Exit codes: 0 done, 2
    bad configuration, 3 new integrity finding, 4 platform trouble (try again), 5 another run moved
    the frontier, 130 and 143 stopped (Ctrl-C, SIGTERM). With --check a finding does not stop the
    steps after it, and with --json each step prints its own object.

    Example: seriatim run demo --messages-max 500000
    """
    settings = config.load_settings()
    file = stream_files.load_stream(stream, settings.streams)
    until = _parse_until_offsets(until_offsets) if until_offsets else None
    # Only tests set a crash point: the process then dies there, to prove that a rerun goes on.
    config.arm_crash_point(settings.crash_point)

    def fold() -> None:
        traced_sessions = _parse_traced_sessions(trace)
        _fold_stream(file, settings, messages_max, until, trace=traced_sessions, json=json)

    steps: list[Callable[[], object]] = [fold]
    if check:
        steps.append(lambda: check_and_report(file, json=json))
        if stream_files.load_runner(file).row_key_spec is not None:
            steps.append(lambda: publish_stream(file, json=json))
    _run_steps(steps)


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
    file: StreamFile,
    settings: Settings,
    messages_max: int | None,
    until: Mapping[Partition, int] | None,
    *,
    trace: tuple[str, ...] = (),
    json: bool,
) -> None:
    """Fold a stream and print the outcome.

    1. Prepare the run. Findings of an earlier run that was killed are printed with this one's.
    2. Fold. However it ends, Spark is stopped, and findings are printed.
    3. Write the report and the status file.
    4. Print the outcome, and remember that its findings were reported.
    """
    # 1. Prepare.
    name = file.stream.name
    # A machine that cannot be loaded is refused before the output folder is created.
    stream_files.load_runner(file)
    stream_files.refuse_unwritable_output(file, create=True)
    open_stream = context.open_for_fold(file, settings, print_notice)
    open_stream.spark.traced_sessions = trace
    progress = output.RunProgress(name)
    fold_run = FoldRun(open_stream, progress=progress)
    fold_run.outcome.findings += unreported_findings(open_stream.ledger, name)
    sequence_before = last_sequence(open_stream.ledger, name)
    # 2. Fold. This commits slice by slice; nothing after it can undo a commit.
    outcome = _run_until_stopped(
        open_stream, fold_run, progress, messages_max or file.stream.slice.messages_max, until
    )
    outcome.findings = findings_with_time_left(fold_run)
    # 3. Write the report and the status file.
    report.write_run_report(file, sequence_before, outcome.sequence)
    _write_status(open_stream)
    # 4. Print.
    try:
        output.print_outcome(name, outcome, json=json)
    finally:
        # Findings raise after they were printed. They count as reported nevertheless.
        mark_reported(open_stream.ledger, outcome.sequence)


def _run_until_stopped(
    open_stream: ConnectedStream,
    fold_run: FoldRun,
    progress: RunProgress,
    messages_max: int,
    until: Mapping[Partition, int] | None,
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


def _write_status(open_stream: ConnectedStream) -> None:

    trouble = write_status_after_run(
        open_stream.file,
        open_stream.log,
        open_stream.ledger,
        open_stream.open_state(),
        open_stream.clock,
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
            f"--trace: {len(names)} sessions", next=f"trace at most {TRACED_SESSIONS_MAX} at a time"
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
    store = open_store(file.stream.output.path)
    folder = f"{store.url}/traces"
    try:
        traces.prune(store)
    except OSError as error:  # that undoes no commit, so it is a notice only
        print_notice(
            f"{file.stream.name}: old traces could not be deleted: {error}; look at {folder}"
        )
    print_notice(f"{file.stream.name}: traces are in {folder}")


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
    output.print_findings(fold_run.stream.name, fold_run.outcome.findings, json=Options.json)
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
    json: Json = False,
) -> None:
    """Show what the next run would do, and commit nothing.

    The plan has the ranges of each partition, new topics, and what waits. A topic or partition that
    the stream does not have is refused. Topics that keep messages for less than 72 hours are named
    in a warning.

    Example: seriatim plan demo
    """
    settings = config.load_settings()
    file = stream_files.load_stream(stream, settings.streams)
    name = file.stream.name
    log = context.log(file, settings)
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
    output.print_plan(file.stream, ledger, slice_plan, short_topics, json=json)


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
