"""`seriatim repair` and `seriatim backfill`: fold a range again, and replace its output in one
commit.

Next: operations/repair/damage.py makes the plan; operations/repair/refold.py applies it.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from seriatim import config, context
from seriatim.cli import CommandResult, JsonObject, Options, print_notice, print_result
from seriatim.cli.options import AllFindings, DryRun, Json, StreamName, load_stream
from seriatim.cli.output import (
    RunProgress,
    errors_among,
    exit_on_signal,
    print_derived_error,
    print_findings,
)
from seriatim.context import ConnectedStream
from seriatim.engine.findings import (
    Finding,
    count_of,
    list_some,
    new_findings_error,
    noun_of,
    printable_session,
    shell_quote,
)
from seriatim.errors import ConfigError, IntegrityError, SeriatimError
from seriatim.ledger.commit import require_head
from seriatim.operations.repair.backfill import backfill_ranges
from seriatim.operations.repair.damage import (
    ForwardAction,
    Hold,
    LiftHaltAction,
    RebuildStateAction,
    RefoldAction,
    RepairAction,
    RepairPlan,
    RepairRequest,
    WellSession,
    plan_repair,
    request_of_hold,
    require_known_partition,
)
from seriatim.operations.repair.refold import RefoldResult, RepairRun, abandon_repair
from seriatim.operations.repair_text import action_lines, fact_lines, held_by_repair
from seriatim.operations.report_findings import mark_reported, unreported_findings
from seriatim.operations.run_request import RefusedValueError, RunRequest, parse_run_request
from seriatim.stream_files import load_runner, refuse_unwritable_output
from seriatim.workers import ChooseWorkers

SESSIONS_NAMED_MAX = 5
"""Sessions that a plan names for each partition."""
MACHINE_CHOICES = ("deployed", "unchanged")
MessagesMax = Annotated[
    int | None,
    typer.Option(
        metavar="COUNT",
        min=1,
        help="How many messages of a partition are folded at a time. Default: as many as in one"
        " slice.",
    ),
]


def repair(
    stream: StreamName,
    partition: Annotated[
        str, typer.Option(metavar="TOPIC/NUMBER", help="Repair this partition only.")
    ] = "",
    session: Annotated[
        str | None, typer.Option(metavar="NAME", help="Repair this session only.")
    ] = None,
    start: Annotated[
        int | None,
        typer.Option(
            "--from",
            metavar="OFFSET",
            min=0,
            help="Fold again from this offset on. Needs --partition or --session.",
        ),
    ] = None,
    forward: Annotated[
        bool,
        typer.Option(
            "--forward",
            help="Go on without messages that Kafka has lost. The gap is published.",
        ),
    ] = False,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Apply the plan. Without it the plan is only shown."),
    ] = False,
    approval: Annotated[
        str,
        typer.Option(
            metavar="TOKEN",
            help="The field `approval` of `repair --json`. If the plan has changed since then,"
            " nothing is applied.",
        ),
    ] = "",
    resume: Annotated[
        str, typer.Option(metavar="ID", help="Continue a repair that was killed.")
    ] = "",
    abandon: Annotated[
        str,
        typer.Option(metavar="ID", help="Give up a repair that was killed: release its hold."),
    ] = "",
    messages_max: MessagesMax = None,
    _all: AllFindings = False,
    _json: Json = False,
) -> AbandonedRepair | None:
    """Find what is damaged, and show or apply the repair.

    Without --apply the plan is shown. With --apply everything is repaired in one commit. These are
    damaged: files that are lost or not as they were committed, sessions in quarantine, partitions
    that wait, and partitions whose check failed. You can also name a partition or a session
    yourself. Each is rewound to the last good state before the damage, and folded again; other
    partitions go on. If the command is killed, type it again, and it continues.

    Example: seriatim repair demo --partition demo-a/3 --apply
    """
    open_stream = _open_stream(stream)
    if abandon:
        partitions = abandon_repair(open_stream, abandon)
        return AbandonedRepair(open_stream.stream.name, abandon, list(map(str, partitions)))
    request = RepairRequest(partition=partition, session=session, start=start, forward=forward)
    # Lost messages concern all sessions of a partition, so going on without them does as well.
    if session is not None and forward:
        raise ConfigError(
            "--forward is about a partition",
            next="a session goes on by its next snapshot, or a release by hand",
        )
    if approval and not (apply or resume):
        raise ConfigError("--approval is of a plan that is to be applied", next="add --apply")
    if resume:
        if request != RepairRequest():
            raise ConfigError(
                "--resume knows what was asked", next="give --resume ID and nothing else"
            )
        request = request_of_hold(open_stream, resume)
    stage_option = "" if messages_max is None else f" --messages-max {messages_max}"
    run_repair(
        open_stream,
        request,
        apply=apply or bool(resume),
        apply_command=f"{request.to_command(shell_quote(stream))} --apply{stage_option}",
        approval=approval,
        messages_max=messages_max,
    )
    return None


def backfill(
    stream: StreamName,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topics", "--topic", help="These topics only. It may be repeated."),
    ] = None,
    partitions: Annotated[
        list[str] | None,
        typer.Option(
            "--partitions",
            "--partition",
            help="These partitions only, as TOPIC/NUMBER. It may be repeated.",
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="EDGE",
            help="The begin: an offset, or a time like 2026-11-16T08:00:00Z.",
        ),
    ] = "",
    until: Annotated[
        str,
        typer.Option(
            "--until", metavar="EDGE", help="The end, which is not included: an offset or a time."
        ),
    ] = "",
    machine: Annotated[
        str,
        typer.Option(
            metavar="deployed|unchanged",
            help="unchanged: refuse if any record or state comes out differently.",
        ),
    ] = "deployed",
    dry_run: DryRun = False,
    messages_max: MessagesMax = None,
    _json: Json = False,
) -> None:
    """Fold a range again, and replace its output in one commit.

    It is folded with the code as it is now. The range is widened: back to the last saved state
    before it, and for each session forward to the point where its state is as committed again, or
    to the frontier. --dry-run prints exactly that range. Everything outside of it stays as it is.
    With --machine unchanged nothing is changed if any record or any session's state comes out
    differently.

    Example: seriatim backfill demo --partitions demo-a/3 --from 41000 --until 52000 --dry-run
    """
    run_request = _parse_backfill_request(
        topics, partitions, start, until, messages_max, dry_run=dry_run
    )
    if machine not in MACHINE_CHOICES:
        raise ConfigError(
            f"--machine: found {machine!r}",
            allowed=" | ".join(MACHINE_CHOICES),
            next="give one of these",
        )
    open_stream = _open_stream(stream)
    ledger = require_head(open_stream.ledger, open_stream.stream.name).ledger
    request = RepairRequest(
        ranges=backfill_ranges(run_request, ledger, open_stream.log),
        unchanged=machine == "unchanged",
    )
    run_repair(
        open_stream,
        request,
        apply=not dry_run,
        apply_command=_backfill_command(stream, run_request, machine),
        approval="",
        messages_max=messages_max,
    )


def _backfill_command(stream: str, run_request: RunRequest, machine: str) -> str:
    """The command of a backfill as a person typed it, without --dry-run."""
    arguments = ["seriatim", "backfill", stream]
    for topic in run_request.topics:
        arguments += ["--topic", topic]
    for partition in run_request.partitions:
        arguments += ["--partition", str(partition)]
    if run_request.start is not None:
        arguments += ["--from", run_request.start.text]
    if run_request.until is not None:
        arguments += ["--until", run_request.until.text]
    if machine != MACHINE_CHOICES[0]:
        arguments += ["--machine", machine]
    if run_request.messages_max is not None:
        arguments += ["--messages-max", str(run_request.messages_max)]
    return " ".join(map(shell_quote, arguments))


def _parse_backfill_request(
    topics: list[str] | None,
    partitions: list[str] | None,
    start: str,
    until: str,
    messages_max: int | None,
    *,
    dry_run: bool,
) -> RunRequest:
    """Parse the options by the rules of the trigger form in Airflow, so that both accept the same.

    A refused value becomes an error that names the option.
    """
    values = {
        "action": "backfill",
        "topics": _split_values(topics),
        "partitions": _split_values(partitions),
        "from": start,
        "until": until,
        "messages_max": messages_max,
        "dry_run": dry_run,
    }
    try:
        return parse_run_request(values)
    except RefusedValueError as error:
        raise ConfigError(
            f"--{error.key.replace('_', '-')}: {error.problem}",
            allowed=error.allowed,
            next="`seriatim backfill --help` shows what can be given",
        ) from None


def _split_values(texts: list[str] | None) -> list[str]:
    """The values of an option that may be repeated, and may have several values with commas."""
    values = []
    for text in texts or []:
        values += [value.strip() for value in text.split(",") if value.strip()]
    return values


def _open_stream(stream: str) -> ConnectedStream:
    return context.open_for_fold(load_stream(stream), config.load_settings(), print_notice)


class AbandonedRepair(CommandResult):
    """A repair that was killed was given up."""

    stream: str
    abandoned: str
    """The id of its hold."""
    partitions: list[str]

    def render(self) -> str:
        """What the next run does."""
        return (
            f"{self.stream}: repair {self.abandoned} is given up; the next run reads"
            f" {', '.join(self.partitions)} again, as before the repair"
        )


def run_repair(
    open_stream: ConnectedStream,
    request: RepairRequest,
    *,
    apply: bool,
    apply_command: str,
    approval: str,
    messages_max: int | None,
) -> None:
    """Plan a repair and print the plan, or apply it. `apply_command` is what a person would type to
    apply the plan.

    A repair that was killed comes first, with its own plan and its own commit. What it did not
    cover is planned after that.
    """
    if request.is_unrestricted and request.partition:
        # A name that is refused must not be announced first.
        name = open_stream.stream.name
        ledger = require_head(open_stream.ledger, name).ledger
        require_known_partition(ledger, request.partition)
        print_notice(
            f"{name} {request.partition}: its record files are checked by their digests",
            proves=request.partition,
        )
    try:
        has_resumed = False
        while True:
            # Each round plans again, since a resumed repair has changed the ledger.
            plan = plan_repair(open_stream, request)
            has_work = bool(plan.actions or plan.deleted_files or plan.resumed_hold)
            if not apply or not has_work:
                if plan.notes or not has_resumed:
                    print_result(PlannedRepair(plan, apply_command))
                return
            _apply_plan(open_stream, plan, approval=approval, messages_max=messages_max)
            if plan.request == request:
                return
            has_resumed = True
            if approval:
                # The approval was for the resumed plan only. The rest needs one of its own.
                print_notice(
                    f"{plan.stream}: repair {plan.resumed_hold} is done;"
                    f" what else is damaged: seriatim repair {plan.stream}"
                )
                return
    finally:
        open_stream.spark.stop()


def _apply_plan(
    open_stream: ConnectedStream,
    repair_plan: RepairPlan,
    *,
    approval: str,
    messages_max: int | None,
) -> None:
    """Apply one plan and print the result."""
    refuse_unwritable_output(open_stream.file)
    _print_plan_notices(repair_plan)
    with context.choose_workers(open_stream.file, open_stream.settings, print_notice) as choose:
        result = _run_repair(open_stream, repair_plan, approval, messages_max, choose)
    _print_applied(open_stream, repair_plan, result, is_approved=bool(approval))


def _run_repair(
    open_stream: ConnectedStream,
    repair_plan: RepairPlan,
    approval: str,
    messages_max: int | None,
    choose_workers: ChooseWorkers,
) -> RefoldResult:
    """Apply one plan, with its progress. Ctrl-C stops it under its hold, and says how to go on."""
    name = open_stream.stream.name
    progress = RunProgress(name)
    repair_run = RepairRun(
        open_stream,
        progress=progress,
        choose_workers=choose_workers,
        load_runner=partial(load_runner, open_stream.file),
    )

    def print_hold_and_kill_spark() -> None:
        progress.close()
        hold = repair_run.result.hold
        print_notice(
            f"{name}: stopped under hold {hold}; the same command goes on,"
            f" or: seriatim repair {name} --abandon {hold}"
        )
        open_stream.spark.kill()

    with exit_on_signal(name, print_hold_and_kill_spark):
        try:
            return repair_run.apply(
                repair_plan, messages_max or open_stream.stream.slice.messages_max, approval
            )
        finally:
            progress.close()


def _print_applied(
    open_stream: ConnectedStream,
    repair_plan: RepairPlan,
    result: RefoldResult,
    *,
    is_approved: bool,
) -> None:
    """Print what a repair did. Findings that are new, or still there, are raised afterwards."""
    name = repair_plan.stream
    findings = unreported_findings(open_stream.ledger, name)
    print_findings(name, findings)
    # After they were printed: a process killed in between prints them again next time.
    mark_reported(open_stream.ledger, result.sequence)
    print_derived_error(name, result.derived_error)
    for finding in errors_among(result.repeated_findings):
        print_notice(describe_remaining_finding(name, finding))
    applied = AppliedRepair(repair_plan, result, findings, is_approved)
    if result.sequence >= 0 or not Options.json:
        print_result(applied)
        return
    # With --json stdout has the values of commits only.
    text = applied.render()
    if text:
        typer.echo(text, err=True)
    error = applied.error()
    if error is not None:
        raise error


def _print_plan_notices(repair_plan: RepairPlan) -> None:
    """Print on stderr what is about to be done."""
    name = repair_plan.stream
    for hold in repair_plan.holds:
        print_notice(f"{name}: {_describe_hold(name, hold)}", hold=hold.id)
    for action in repair_plan.actions:
        print_notice(
            f"{name} {action.partition}: {_describe_action(action)}",
            partition=str(action.partition),
        )
    for note in repair_plan.notes:
        print_notice(f"{name}: not repaired by this:\n{note}", note=note)


class PlannedRepair(CommandResult):
    """The plan of a repair that was not applied."""

    plan: RepairPlan
    apply_command: str
    """What a person types to apply it."""

    def to_json(self) -> JsonObject:
        """The plan, with one object for each action."""
        plan = self.plan
        return {
            "stream": plan.stream,
            "sequence": plan.sequence,
            "approval": plan.approval,
            "resumes": plan.resumed_hold,
            "holds": [{"id": hold.id, **hold.describe(plan.stream)} for hold in plan.holds],
            "parts": [_action_values(action) for action in plan.actions],
            "notes": list(plan.notes),
            "well": [_well_values(well) for well in plan.well_sessions],
            "drops": list(plan.deleted_files),
        }

    def render(self) -> str:
        """What is damaged, what would be done about it, and how to do it."""
        plan = self.plan
        name = plan.stream
        lines = [*self._deleted_file_lines(), *self._hold_lines()]
        if plan.actions or plan.notes:
            lines += self._action_lines()
        elif plan.deleted_files:
            lines += [
                f"{name}: nothing else is damaged, as of entry {plan.sequence}",
                f"\nnothing was changed. To delete it: {self.apply_command}",
            ]
        else:
            lines += [f"{name}: {well.describe()}" for well in plan.well_sessions]
            lines.append(
                f"{name}: nothing is damaged, as of entry {plan.sequence}; to fold again all the"
                f" same: seriatim repair {name} --partition TOPIC/NUMBER --from OFFSET"
            )
        return "\n".join(lines)

    def error(self) -> SeriatimError | None:
        """Damage that the plan does not repair."""
        return _error_of_notes(self.plan)

    def _action_lines(self) -> list[str]:
        """What would be done, what would not be repaired, and how to apply the plan."""
        plan = self.plan
        outlook = "this would be done in one commit"
        if not plan.actions and not plan.deleted_files and not plan.resumed_hold:
            outlook = "this repair would change nothing"
        lines = [f"{plan.stream}: as of entry {plan.sequence}, {outlook}"]
        for action in plan.actions:
            lines += ["", *action_lines(_action_values(action))]
        for note in plan.notes:
            lines.append(typer.style(f"\nnot repaired by this:\n{note}", fg=typer.colors.YELLOW))
        if plan.actions or plan.deleted_files:
            apply_command = self.apply_command
            if plan.resumed_hold:
                # The plan is that of the repair that was killed, maybe of another command.
                apply_command = f"seriatim repair {plan.stream} --resume {plan.resumed_hold}"
            lines.append(f"\nnothing was changed. To do it: {apply_command}")
        return lines

    def _deleted_file_lines(self) -> list[str]:
        lines = []
        for path in self.plan.deleted_files:
            lines += [
                (
                    f"{self.plan.stream}: {path} is damaged, and nothing needs it any more:"
                    " newer files took its place"
                ),
                (
                    "  only a look at the past would read it (trace, replay); runs and readers go on,"
                    " nothing has to be done"
                ),
                "  with --apply it is deleted, and verify does not report it again",
            ]
        return lines

    def _hold_lines(self) -> list[str]:
        """Every hold with its id, and what it means for this plan."""
        plan = self.plan
        lines = []
        for hold in plan.holds:
            lines.append(f"{plan.stream}: {_describe_hold(plan.stream, hold)}")
            if hold.id == plan.resumed_hold:
                text = "  this plan goes on with it"
                if not plan.actions:
                    text += ": applied, it gives the partitions back"
                lines.append(text)
            elif hold in plan.blocking_holds:
                lines.append("  it is in the way of this plan")
            lines.append("")
        return lines


def _describe_hold(stream: str, hold: Hold) -> str:
    facts = hold.describe(stream)
    headline = f"{facts.pop('held')} is {held_by_repair(hold.id)}, which is at work or died"
    return "\n".join([headline, *fact_lines(facts)])


def _describe_action(action: RepairAction) -> str:
    """An action on one line."""
    if isinstance(action, ForwardAction):
        passed_range = action.passed_range
        return (
            f"goes on at offset {passed_range.end},"
            f" without {count_of(len(passed_range), 'offset')} {passed_range}"
        )
    if isinstance(action, LiftHaltAction):
        return f"is read again from offset {action.halt.offset} by the next run: {action.reason}"
    if isinstance(action, RebuildStateAction):
        return (
            f"goes on at offset {action.frontier} with a state that is rebuilt from its records,"
            " because Kafka no longer has the messages"
        )
    rewind = action.rewind
    text = f"folds again [{rewind.start}, {rewind.first_commit_offset})"
    if rewind.first_commit_offset < rewind.frontier:
        text += f", then sessions that still differ, at most to {rewind.frontier}"
    sessions = rewind.request.sessions
    if sessions is not None:
        names = [printable_session(session) for session in sorted(sessions)]
        noun = noun_of(len(names), "session")
        text += f", only {noun} {list_some(names, SESSIONS_NAMED_MAX)}"
    return text


def _action_facts(action: RepairAction) -> dict[str, str]:
    """The lines below an action: why it is needed, and what it reads."""
    if isinstance(action, ForwardAction | LiftHaltAction):
        return {
            "waits": f"{action.halt.finding} at offset {action.halt.offset}",
            "cause": action.halt.cause,
        }
    if isinstance(action, RebuildStateAction):
        return {
            "why": action.reason,
            "then": "records stay as they are; a session goes on if its next sequence follows the"
            " rebuilt state, else with its next snapshot",
        }
    rewind = action.rewind
    facts = {
        "why": rewind.request.reason,
        "begins": f"from the state of entry {rewind.sequence}, at offset {rewind.start}",
        "reads": f"at most {count_of(len(rewind.read_range), 'message')} {rewind.read_range}; Kafka has them",
    }
    if rewind.frontier < rewind.account.frontier:
        facts["frontier"] = (
            f"goes back from {rewind.account.frontier} to {rewind.frontier}, where the log ends"
        )
    return facts


def _well_values(well: WellSession) -> JsonObject:
    return {
        "session": well.session,
        "partition": str(well.partition),
        "since": well.since,
        "how": well.ended_by,
        "says": well.describe(),
    }


def _action_values(action: RepairAction) -> JsonObject:
    values: JsonObject = {
        "partition": str(action.partition),
        "does": _describe_action(action),
        "facts": _action_facts(action),
    }
    if isinstance(action, RefoldAction):
        rewind = action.rewind
        return values | {
            "what": "refold",
            "from": rewind.start,
            "until": rewind.first_commit_offset,
            "frontier": rewind.frontier,
            "messages": len(rewind.read_range),
            "sessions": rewind.request.sessions,
            "why": rewind.request.reason,
        }
    if isinstance(action, LiftHaltAction):
        return values | {"what": "lift", "from": action.halt.offset, "why": action.reason}
    if isinstance(action, RebuildStateAction):
        return values | {"what": "renew", "from": action.frontier, "why": action.reason}
    return values | {
        "what": "forward",
        "from": action.passed_range.start,
        "until": action.passed_range.end,
        "why": action.halt.finding,
    }


class AppliedRepair(CommandResult):
    """What a repair did."""

    plan: RepairPlan
    result: RefoldResult
    findings: list[Finding]
    is_approved: bool = False
    """Whether a person approved the plan. Then it was done, and damage beside it does not fail the
    repair: the plan that the person read names it. Findings that are new do.
    """

    def to_json(self) -> JsonObject:
        """The counts of the commit, and the ranges that were folded again."""
        result = self.result
        ranges = {
            str(partition): [offset_range.start, offset_range.end]
            for partition, offset_range in result.ranges.items()
        }
        return {
            "stream": self.plan.stream,
            "sequence": result.sequence,
            "hold": result.hold,
            "messages": result.messages,
            "records": result.records,
            "removed": result.removed_files,
            "ranges": ranges,
            "findings": len(self.findings),
            "still": len(result.repeated_findings),
            "notes": list(self.plan.notes),
        }

    def render(self) -> str:
        """What was folded again; without a commit, what was deleted and released."""
        name = self.plan.stream
        result = self.result
        lines = []
        if result.sequence >= 0:
            for partition, offset_range in result.ranges.items():
                lines.append(f"{name} {partition}: folded again {offset_range}")
            lines.append(
                f"{name}: done by entry {result.sequence}:"
                f" {count_of(result.messages, 'message')} → {count_of(result.records, 'record')}"
            )
            return "\n".join(lines)
        deleted_files = self.plan.deleted_files
        if deleted_files:
            lines.append(
                f"{name}: damaged files that nothing needs were deleted: {len(deleted_files)}"
            )
        if self.plan.resumed_hold:
            lines.append(
                f"{name}: nothing is damaged any more; hold {self.plan.resumed_hold} is released"
            )
        return "\n".join(lines)

    def error(self) -> SeriatimError | None:
        """Findings that are new or still there; else damage that the plan does not repair."""
        errors = errors_among(self.findings)
        remaining_errors = errors_among(self.result.repeated_findings)
        if self.result.sequence >= 0 and errors:
            return new_findings_error(self.plan.stream, errors)
        if self.result.sequence >= 0 and remaining_errors:
            return IntegrityError(
                f"{self.plan.stream}: findings that are still there after folding again:"
                f" {len(remaining_errors)}",
                next="the same messages give them again: ask the producer for a snapshot of each"
                " session, or wait for the next one",
            )
        return None if self.is_approved else _error_of_notes(self.plan)


def describe_remaining_finding(name: str, finding: Finding) -> str:
    """A finding that is still there after folding again, and why."""
    reason = finding.cause or f"expected {finding.expected}, found {finding.found}"
    return (
        f"{name} {finding.partition_name}: {finding.finding} at offset {finding.offset}"
        f" is still there: {reason}"
    )


def _error_of_notes(plan: RepairPlan) -> IntegrityError | None:
    """The error of a plan that cannot repair everything that is damaged."""
    if not plan.notes:
        return None
    count = len(plan.notes)
    verb = "is" if count == 1 else "are"
    advice = "see 'not repaired by this' above"
    if Options.json:
        advice = "see `notes`"
    return IntegrityError(f"{plan.stream}: {count_of(count, 'problem')} {verb} left", next=advice)
