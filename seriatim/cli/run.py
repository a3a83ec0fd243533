"""`seriatim run` and `seriatim plan`: fold a stream until caught up, or see what that would do.

Next room: operations/run.py does it; cli/output.py tells what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from seriatim import config
from seriatim.cli import Options, app, print_notice
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, IntegrityError, PlatformError

if TYPE_CHECKING:
    from seriatim.config import Settings
    from seriatim.engine.findings import Finding
    from seriatim.operations.run import FoldRun
    from seriatim.stream_files import StreamFile

StreamName = Annotated[
    str, typer.Argument(metavar="STREAM", help="A name in streams/, or a path to a TOML file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

UntilOffsets = Annotated[
    str,
    typer.Option(
        metavar="JSON", help='Stop there: {"topic": {"0": 1200}}. Other partitions are not read.'
    ),
]


@app.command()
def run(
    stream: StreamName,
    messages_max: Annotated[
        int | None,
        typer.Option(min=1, help="Messages in one slice, but at least one of each partition."),
    ] = None,
    until_offsets: UntilOffsets = "",
    check: Annotated[
        bool,
        typer.Option("--check", help="Then judge what was committed, and publish what is checked."),
    ] = False,
    trace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SESSION", help="Leave this session's trace under traces/; repeatable."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Fold a stream from its frontier to the log ends of now, slice by slice.

    Can be killed anywhere and run again. Exit codes: 0 done, 2 bad configuration, 3 new integrity
    finding, 4 platform trouble (retry), 5 another run moved the frontier, 130 and 143 stopped
    (Ctrl-C, SIGTERM). With --check a finding does not keep the steps after it from their work, and
    with --json each prints its object.

    Example: seriatim run demo --messages-max 500000
    """
    from seriatim import stream_files

    Options.json = json
    settings = config.load_settings()
    file = stream_files.load_stream(stream, settings.streams)
    until = _parse_until_offsets(until_offsets) if until_offsets else None
    config.arm_crash_point(settings.crash_point)
    steps: list[Callable[[], object]] = [
        lambda: _fold_stream(
            file, settings, messages_max, until, trace=_parse_traced_sessions(trace), json=json
        )
    ]
    if check:
        from seriatim.cli import check as gate
        from seriatim.cli import publish

        steps += [lambda: gate.check_and_report(file, json=json)]
        if stream_files.load_runner(file).row_key_spec is not None:
            steps += [lambda: publish.publish_stream(file, json=json)]
    _run_steps(steps)


def _run_steps(steps: Sequence[Callable[[], object]]) -> None:
    """Each step, whatever the data did to those before it; then the first failure. A fault of ours
    ends it at once.
    """
    failure: IntegrityError | None = None
    for step in steps:
        try:
            step()
        except IntegrityError as error:
            if failure is not None:
                print_notice(error.render())
            failure = failure or error
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
    from seriatim import context, stream_files
    from seriatim.cli import output, report
    from seriatim.cli.stop import exit_on_signal
    from seriatim.operations.report_findings import (
        last_sequence,
        mark_reported,
        unreported_findings,
    )
    from seriatim.operations.run import FoldRun
    from seriatim.web.write_status import write_status_after_run

    runner = stream_files.load_runner(file)
    stream_files.refuse_unwritable_output(file, create=True)
    spark, progress = (
        context.LazySpark(file, settings, print_notice),
        output.RunProgress(file.stream.name),
    )
    spark.traced_sessions = trace
    world = context.fold_context(file, settings, spark)
    folding = FoldRun(file.stream, runner, world, progress=progress)
    folding.outcome.findings += unreported_findings(world.ledger, file.stream.name)
    since = last_sequence(world.ledger, file.stream.name)

    def last() -> None:
        progress.close()
        print_findings_of_run(folding)
        spark.kill()

    with exit_on_signal(file.stream.name, last), _prune_traces_afterwards(file, trace):
        try:
            outcome = folding.run(messages_max or file.stream.slice.messages_max, until)
        except BaseException:
            progress.close()
            print_findings_of_run(folding)
            raise
        finally:
            progress.close()
            spark.stop()
    outcome.findings = findings_with_time_left(folding)
    report.write_run_report(file, since, outcome.sequence)
    if trouble := write_status_after_run(
        file, world.log, world.ledger, world.open_state(), world.clock
    ):
        print_notice(
            f"{file.stream.name}: the status file could not be written: {trouble}", status=None
        )
    try:
        output.print_outcome(file.stream.name, outcome, json=json)
    finally:
        mark_reported(world.ledger, outcome.sequence)


def _parse_traced_sessions(session_names: list[str] | None) -> tuple[str, ...]:
    """Sessions that are traced beside the fold."""
    from seriatim.airflow.run_request import TRACED_SESSIONS_MAX
    from seriatim.cli.lookback import check_session_name

    names = tuple(
        dict.fromkeys(
            name for one in session_names or () if (name := check_session_name(one)) is not None
        )
    )
    if len(names) > TRACED_SESSIONS_MAX:
        raise ConfigError(
            f"--trace: {len(names)} sessions", next=f"trace at most {TRACED_SESSIONS_MAX} at a time"
        )
    return names


@contextmanager
def _prune_traces_afterwards(file: StreamFile, trace: tuple[str, ...]) -> Iterator[None]:
    """However a traced run ends, its traces are bounded."""
    try:
        yield
    finally:
        if trace:
            _prune_traces(file)


def _prune_traces(file: StreamFile) -> None:
    """Traces are bounded: the oldest go."""
    from pathlib import Path

    from seriatim.storage import traces

    root = Path(file.stream.output.path)
    try:
        traces.prune(root)
    except OSError as error:  # the run is over and well
        print_notice(
            f"{file.stream.name}: old traces could not be deleted: {error}; look at {root / 'traces'}"
        )
    print_notice(f"{file.stream.name}: traces are in {root / 'traces'}")


def findings_with_time_left(folding: FoldRun) -> list[Finding]:
    """A run's findings with the time left to act, and warnings where it runs out."""
    from seriatim.operations.retention import partition_clocks, time_left_warnings, with_time_left

    stream, world, ledger = folding.stream, folding.context, folding.head.ledger
    try:
        clocked = partition_clocks(
            ledger, world.log, world.log.bounds(stream.topics), world.clock.now_seconds()
        )
    except (
        PlatformError
    ) as trouble:  # the run is done and committed: that Kafka is silent now does not undo it
        print_notice(f"{stream.name}: time left is not known: {trouble.message}")
        return folding.outcome.findings
    return [
        *with_time_left(folding.outcome.findings, clocked),
        *time_left_warnings(stream, ledger, clocked),
    ]


def print_findings_of_run(folding: FoldRun) -> None:
    """Findings of a run that ends before its time."""
    from seriatim.cli import output
    from seriatim.operations.report_findings import mark_reported

    output.print_findings(folding.stream.name, folding.outcome.findings, json=Options.json)
    mark_reported(folding.context.ledger, folding.head.ledger.sequence)


@app.command()
def plan(
    stream: StreamName,
    until_offsets: UntilOffsets = "",
    topic: Annotated[
        list[str] | None, typer.Option(help="Show this topic's ranges; repeatable.")
    ] = None,
    partition: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC/NUMBER", help="Show this partition's range; repeatable."),
    ] = None,
    json: Json = False,
) -> None:
    """Show what the next run would do: ranges per partition, new topics, what waits. Commits
    nothing.

    Refuses a place that the stream does not have. Warns of topics that keep messages for less than
    72 hours.

    Example: seriatim plan demo
    """
    from seriatim import context, stream_files
    from seriatim.cli import output
    from seriatim.clock import WallClock
    from seriatim.ledger.verdicts import refuse_open_circuit
    from seriatim.operations.plan import plan_run as make
    from seriatim.operations.plan import short_retention
    from seriatim.operations.slicing import ranges_to_read, select_ranges

    Options.json = json
    settings = config.load_settings()
    file = stream_files.load_stream(stream, settings.streams)
    log = context.log(file, settings)
    ledger, made = make(file.stream, log, context.ledger(file))
    made.ranges = select_ranges(
        made, topic or (), [Partition.parse(place) for place in partition or ()], file.stream.name
    )
    if until_offsets:
        made.ranges = ranges_to_read(made, _parse_until_offsets(until_offsets), file.stream.name)
    context.refuse_machine_for_ledger(file, ledger)
    refuse_open_circuit(ledger, file.stream.on_check_failure)
    short = short_retention(file.stream, log, ledger, WallClock())
    output.print_plan(file.stream, ledger, made, short, json=json)


def _parse_until_offsets(text: str) -> dict[Partition, int]:
    """`{"topic": {"0": 1200}}` as a person writes it."""
    import msgspec

    try:
        given = msgspec.json.decode(text.encode(), type=dict[str, dict[str, int]])
        until = {
            Partition.parse(f"{topic}/{p}"): end
            for topic, ends in given.items()
            for p, end in ends.items()
        }
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"--until-offsets: {error}",
            allowed='{"topic": {"0": 1200}}',
            next="give offsets by topic and partition",
        ) from None
    for partition, end in until.items():
        if end < 0:
            raise ConfigError(
                f"--until-offsets: {partition} has {end}", next="give offsets of 0 or more"
            )
    return until
