"""Print the plan of a repair, apply it, and print the result, for people and for scripts.

Next: cli/repair.py has the commands; operations/repair/plan.py makes the plan.
"""

from __future__ import annotations

from typing import Any

import msgspec
import typer

from seriatim.cli import Options, output, print_notice
from seriatim.cli.stop import exit_on_signal
from seriatim.context import ConnectedStream
from seriatim.engine.findings import Finding, new_findings_error, shorten
from seriatim.errors import IntegrityError
from seriatim.ledger.commit import require_head
from seriatim.operations.repair.damage import (
    ForwardAction,
    Hold,
    LiftHaltAction,
    RebuildStateAction,
    RefoldAction,
    RepairAction,
    RepairPlan,
    RepairRequest,
    plan_repair,
    require_known_partition,
)
from seriatim.operations.repair.refold import RefoldResult, RepairRun
from seriatim.operations.report_findings import mark_reported, unreported_findings
from seriatim.ports import OpenStream
from seriatim.stream_files import refuse_unwritable_output


def run_repair(
    open_stream: ConnectedStream,
    request: RepairRequest,
    *,
    apply: bool,
    apply_command: str,
    approval: str,
    messages_max: int | None,
    json: bool,
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
                    _print_plan(plan, apply_command, json=json)
                _raise_for_notes(plan)
                return
            _apply_plan(open_stream, plan, approval=approval, messages_max=messages_max, json=json)
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
    json: bool,
) -> None:
    """Apply one plan and print the result. Ctrl-C stops it under its hold, and says how to go on."""
    name = open_stream.stream.name
    refuse_unwritable_output(open_stream.file)
    _print_plan_notices(repair_plan)
    progress = output.RunProgress(name)
    repair_run = RepairRun(open_stream, progress=progress)

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
            result = repair_run.apply(
                repair_plan, messages_max or open_stream.stream.slice.messages_max, approval
            )
        finally:
            progress.close()
    _print_result(open_stream, repair_plan, result, json=json)
    _raise_for_notes(repair_plan)


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


def _print_plan(repair_plan: RepairPlan, apply_command: str, *, json: bool) -> None:
    """Print the plan on stdout, for people or scripts."""
    if json:
        typer.echo(msgspec.json.encode(_plan_values(repair_plan)).decode())
        return
    name = repair_plan.stream
    _print_deleted_files(repair_plan)
    _print_holds(repair_plan)
    if repair_plan.actions or repair_plan.notes:
        _print_actions(repair_plan, apply_command)
    elif repair_plan.deleted_files:
        typer.echo(f"{name}: nothing else is damaged, as of entry {repair_plan.sequence}")
        typer.echo(f"\nnothing was changed. To delete it: {apply_command}")
    else:
        typer.echo(
            f"{name}: nothing is damaged, as of entry {repair_plan.sequence};"
            " to fold again all the same, say --from"
        )


def _print_actions(repair_plan: RepairPlan, apply_command: str) -> None:
    """Print what would be done, what would not be repaired, and how to apply the plan."""
    name = repair_plan.stream
    typer.echo(f"{name}: as of entry {repair_plan.sequence}, this would be done in one commit")
    for action in repair_plan.actions:
        typer.echo(f"\n{action.partition}  {_describe_action(action)}")
        for label, fact in _action_facts(action).items():
            typer.echo(f"  {label:<9} {shorten(fact)}")
    for note in repair_plan.notes:
        typer.secho(f"\nnot repaired by this:\n{note}", fg=typer.colors.YELLOW)
    if repair_plan.actions or repair_plan.deleted_files:
        if repair_plan.resumed_hold:
            # The plan is that of the repair that was killed, which may have been another command.
            apply_command = f"seriatim repair {name} --resume {repair_plan.resumed_hold}"
        typer.echo(f"\nnothing was changed. To do it: {apply_command}")


def _print_deleted_files(repair_plan: RepairPlan) -> None:
    for path in repair_plan.deleted_files:
        typer.echo(
            f"{repair_plan.stream}: {path} is damaged, and nothing needs it any more:"
            " newer files took its place"
        )
        typer.echo(
            "  only a look at the past would read it (trace, replay); runs and readers go on,"
            " nothing has to be done"
        )
        typer.echo("  with --apply it is deleted, and verify does not report it again")


def _print_holds(repair_plan: RepairPlan) -> None:
    """Print every hold with its id, and what it means for this plan."""
    for hold in repair_plan.holds:
        typer.echo(f"{repair_plan.stream}: {_describe_hold(repair_plan.stream, hold)}")
        if hold.id == repair_plan.resumed_hold:
            text = "  this plan goes on with it"
            if not repair_plan.actions:
                text += ": applied, it gives the partitions back"
            typer.echo(text)
        elif hold in repair_plan.blocking_holds:
            typer.echo("  it is in the way of this plan")
        typer.echo("")


def _describe_hold(stream: str, hold: Hold) -> str:
    facts = hold.describe(stream)
    lines = [f"{facts.pop('held')} is held by repair {hold.id}, which is at work or died"]
    lines += [f"  {label:<9} {fact}" for label, fact in facts.items()]
    return "\n".join(lines)


def _describe_action(action: RepairAction) -> str:
    """An action on one line."""
    if isinstance(action, ForwardAction):
        passed_range = action.passed_range
        plural = "" if len(passed_range) == 1 else "s"
        return (
            f"goes on at offset {passed_range.end},"
            f" without {len(passed_range)} offset{plural} {passed_range}"
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
        plural = "" if len(sessions) == 1 else "s"
        text += f", only {len(sessions)} session{plural}"
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
        "reads": f"at most {len(rewind.read_range)} messages {rewind.read_range}; Kafka has them",
    }
    if rewind.frontier < rewind.account.frontier:
        facts["frontier"] = (
            f"goes back from {rewind.account.frontier} to {rewind.frontier}, where the log ends"
        )
    return facts


def _plan_values(repair_plan: RepairPlan) -> dict[str, Any]:
    """The plan as plain values, for scripts."""
    holds = [{"id": hold.id, **hold.describe(repair_plan.stream)} for hold in repair_plan.holds]
    return {
        "stream": repair_plan.stream,
        "sequence": repair_plan.sequence,
        "approval": repair_plan.approval,
        "resumes": repair_plan.resumed_hold,
        "holds": holds,
        "parts": [_action_values(action) for action in repair_plan.actions],
        "notes": list(repair_plan.notes),
        "drops": list(repair_plan.deleted_files),
    }


def _action_values(action: RepairAction) -> dict[str, Any]:
    values: dict[str, Any] = {
        "partition": str(action.partition),
        "does": _describe_action(action),
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


def _print_result(
    open_stream: OpenStream, repair_plan: RepairPlan, result: RefoldResult, *, json: bool
) -> None:
    """Print what was done. Findings that are new, or still there, are printed and raised."""
    name = repair_plan.stream
    ledger_store = open_stream.ledger
    findings = unreported_findings(ledger_store, name)
    output.print_findings(name, findings, json=json)
    # After they were printed: a process killed in between prints them again next time.
    mark_reported(ledger_store, result.sequence)
    if result.sequence < 0:
        _print_without_commit(repair_plan, json=json)
        return
    if result.derived_error:
        output.print_derived_error(name, result.derived_error, json=json)
    if json:
        values = _result_values(repair_plan, result, findings)
        typer.echo(msgspec.json.encode(values).decode())
    else:
        for partition, offset_range in result.ranges.items():
            typer.echo(f"{name} {partition}: folded again {offset_range}")
        typer.echo(
            f"{name}: done by entry {result.sequence}:"
            f" {result.messages} messages → {result.records} records"
        )
    _raise_for_findings(name, findings, result)


def _raise_for_findings(name: str, findings: list[Finding], result: RefoldResult) -> None:
    """Raise if findings are new, or if findings are still there after folding again."""
    remaining_errors = [finding for finding in result.repeated_findings if finding.level == "error"]
    for finding in remaining_errors:
        print_notice(describe_remaining_finding(name, finding))
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise new_findings_error(name, errors)
    if remaining_errors:
        raise IntegrityError(
            f"{name}: findings that are still there after folding again: {len(remaining_errors)}",
            next="the cause is in the messages themselves: fix the producer,"
            " or wait for the sessions' next snapshots",
        )


def _print_without_commit(repair_plan: RepairPlan, *, json: bool) -> None:
    """Print the result of a plan that changed no records: files deleted, a hold released."""
    # With --json stdout has the values of commits only, so these lines go to stderr.
    name = repair_plan.stream
    if repair_plan.deleted_files:
        typer.echo(
            f"{name}: damaged files that nothing needs were deleted:"
            f" {len(repair_plan.deleted_files)}",
            err=json,
        )
    if repair_plan.resumed_hold:
        typer.echo(
            f"{name}: nothing is damaged any more; hold {repair_plan.resumed_hold} is released",
            err=json,
        )


def _result_values(
    repair_plan: RepairPlan, result: RefoldResult, findings: list[Finding]
) -> dict[str, Any]:
    ranges = {
        str(partition): [offset_range.start, offset_range.end]
        for partition, offset_range in result.ranges.items()
    }
    return {
        "stream": repair_plan.stream,
        "sequence": result.sequence,
        "hold": result.hold,
        "messages": result.messages,
        "records": result.records,
        "removed": result.removed_files,
        "ranges": ranges,
        "findings": len(findings),
        "still": len(result.repeated_findings),
        "notes": list(repair_plan.notes),
    }


def describe_remaining_finding(name: str, finding: Finding) -> str:
    """A finding that is still there after folding again, and why."""
    reason = finding.cause or f"expected {finding.expected}, found {finding.found}"
    return (
        f"{name} {finding.partition_name}: {finding.finding} at offset {finding.offset}"
        f" is still there: {reason}"
    )


def _raise_for_notes(repair_plan: RepairPlan) -> None:
    """Raise if the plan cannot repair everything that is damaged."""
    if not repair_plan.notes:
        return
    advice = "each of the notes above says what to do about it"
    if Options.json:
        advice = "see `notes`"
    raise IntegrityError(
        f"{repair_plan.stream}: damage that this does not repair: {len(repair_plan.notes)}",
        next=advice,
    )
