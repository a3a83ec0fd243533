"""Plans of repairs, shown and applied: for people on a terminal, for logs, and for scripts.

Next room: cli/repair.py has the commands; operations/repair/plan.py the plan.
"""

from __future__ import annotations

from typing import Any

import msgspec
import typer

from seriatim.cli import Options, output, print_notice
from seriatim.cli.stop import exit_on_signal
from seriatim.context import LazySpark
from seriatim.engine.findings import Finding, new_findings_error, shorten
from seriatim.errors import IntegrityError
from seriatim.operations.repair.plan import (
    ForwardAction,
    Hold,
    LiftHaltAction,
    RebuildStateAction,
    RefoldAction,
    RepairAction,
    RepairPlan,
    RepairRequest,
)
from seriatim.operations.repair.refold import RefoldResult
from seriatim.operations.repair.repair import RepairContext, RepairRun, plan_repair
from seriatim.operations.report_findings import mark_reported, unreported_findings
from seriatim.stream_files import StreamFile, refuse_unwritable_output


def run_repair(
    file: StreamFile,
    context: RepairContext,
    spark: LazySpark,
    request: RepairRequest,
    *,
    apply: bool,
    approval: str,
    messages_max: int | None,
    json: bool,
) -> None:
    """Plan; then do it, where that is wanted. Repairs that died come first, each with its own plan
    and commit.
    """
    went_on = False
    if request.is_unrestricted and request.partition:
        print_notice(
            f"{file.stream.name} {request.partition}: its record files are proved by their digests",
            proves=request.partition,
        )
    try:
        while True:
            made = plan_repair(context, request)
            if not apply or not (made.actions or made.deleted_files or made.resumed_hold):
                if made.notes or not went_on:
                    _print_plan(made, json=json)
                _raise_for_notes(made)
                return
            _apply_plan(
                file, context, spark, made, approval=approval, messages_max=messages_max, json=json
            )
            if made.request == request:
                return
            went_on = True
            if approval:
                print_notice(
                    f"{made.stream}: repair {made.resumed_hold} is done; what else is hurt: seriatim repair {made.stream}"
                )
                return
    finally:
        spark.stop()


def _apply_plan(
    file: StreamFile,
    context: RepairContext,
    spark: LazySpark,
    repair_plan: RepairPlan,
    *,
    approval: str,
    messages_max: int | None,
    json: bool,
) -> None:
    """One plan, done and told."""
    name = file.stream.name
    refuse_unwritable_output(file)
    for hold in repair_plan.holds:
        print_notice(f"{name}: {_describe_hold(name, hold)}", hold=hold.id)
    for part in repair_plan.actions:
        print_notice(
            f"{name} {part.partition}: {_describe_part(part)}", partition=str(part.partition)
        )
    for note in repair_plan.notes:
        print_notice(f"{name}: not mended by this:\n{note}", note=note)
    progress = output.RunProgress(name)
    repairing = RepairRun(context, progress=progress)

    def last() -> None:
        progress.close()
        hold = repairing.refold_run.result.hold
        print_notice(
            f"{name}: stopped under hold {hold}; the same command goes on, or: seriatim repair {name} --abandon {hold}"
        )
        spark.kill()

    with exit_on_signal(name, last):
        try:
            done = repairing.apply(
                repair_plan, messages_max or file.stream.slice.messages_max, approval
            )
        finally:
            progress.close()
    _print_result(context, repair_plan, done, json=json)
    _raise_for_notes(repair_plan)


def _print_plan(repair_plan: RepairPlan, *, json: bool) -> None:
    """The plan, for people or scripts."""
    if json:
        typer.echo(msgspec.json.encode(_plan_values(repair_plan)).decode())
        return
    name = repair_plan.stream
    for path in repair_plan.deleted_files:
        typer.echo(
            f"{name}: {path} is damaged, and nothing needs it any more: newer files took its place"
        )
        typer.echo(
            "  only a look at the past would read it (trace, replay); runs and readers go on, nothing has to be done"
        )
        typer.echo("  with --apply it is deleted, and verify does not report it again")
    _print_holds(repair_plan)
    if not repair_plan.actions and not repair_plan.notes:
        if repair_plan.deleted_files:
            typer.echo(f"{name}: nothing else is hurt, as of entry {repair_plan.sequence}")
            typer.echo("\nnothing was changed. To delete it, give the same command with --apply")
        else:
            typer.echo(
                f"{name}: nothing is hurt, as of entry {repair_plan.sequence}; to fold again all the same, say --from"
            )
        return
    typer.echo(f"{name}: as of entry {repair_plan.sequence}, this would be done in one commit")
    for part in repair_plan.actions:
        typer.echo(f"\n{part.partition}  {_describe_part(part)}")
        for label, fact in _part_facts(part).items():
            typer.echo(f"  {label:<9} {shorten(fact)}")
    for note in repair_plan.notes:
        typer.secho(f"\nnot mended by this:\n{note}", fg=typer.colors.YELLOW)
    if repair_plan.actions or repair_plan.deleted_files:
        again = "without --dry-run" if repair_plan.request.ranges else "with --apply"
        typer.echo(f"\nnothing was changed. To do it, give the same command {again}")


def _print_holds(repair_plan: RepairPlan) -> None:
    """Every hold by its id, with what can be done about it."""
    for hold in repair_plan.holds:
        typer.echo(f"{repair_plan.stream}: {_describe_hold(repair_plan.stream, hold)}")
        if hold.id == repair_plan.resumed_hold:
            typer.echo(
                "  this plan goes on with it"
                + ("" if repair_plan.actions else ": applied, it gives the partitions back")
            )
        elif hold in repair_plan.blocking_holds:
            typer.echo("  it is in the way of this plan")
        typer.echo("")


def _describe_hold(stream: str, hold: Hold) -> str:
    facts = hold.describe(stream)
    lines = [f"{facts.pop('held')} is held by repair {hold.id}, which is at work or died"]
    return "\n".join([*lines, *(f"  {label:<9} {fact}" for label, fact in facts.items())])


def _describe_part(part: RepairAction) -> str:
    """A part on one line."""
    if isinstance(part, ForwardAction):
        return f"goes on at offset {part.passed_range.end}, without {len(part.passed_range)} offsets {part.passed_range}"
    if isinstance(part, LiftHaltAction):
        return f"is read again from offset {part.halt.offset} by the next run: {part.reason}"
    if isinstance(part, RebuildStateAction):
        return f"goes on at offset {part.frontier} with the state that its records make, without what made it"
    rewind = part.rewind
    only = rewind.request.sessions
    who = "" if only is None else f", {len(only)} session{'s' * (len(only) != 1)} alone"
    further = f", then sessions that still differ, at most to {rewind.frontier}"
    whole = f"[{rewind.start}, {rewind.first_commit_offset})"
    return (
        f"folds again {whole}{further if rewind.first_commit_offset < rewind.frontier else ''}{who}"
    )


def _part_facts(part: RepairAction) -> dict[str, str]:
    if isinstance(part, ForwardAction | LiftHaltAction):
        return {
            "waits": f"{part.halt.finding} at offset {part.halt.offset}",
            "cause": part.halt.cause,
        }
    if isinstance(part, RebuildStateAction):
        told = "records stay as they are; sessions go on by a sequence that proves them, or with their next snapshot"
        return {"why": part.reason, "then": told}
    rewind = part.rewind
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
    """The plan for scripts."""
    return {
        "stream": repair_plan.stream,
        "sequence": repair_plan.sequence,
        "approval": repair_plan.approval,
        "resumes": repair_plan.resumed_hold,
        "holds": [
            {"id": hold.id, **hold.describe(repair_plan.stream)} for hold in repair_plan.holds
        ],
        "parts": [_part_values(part) for part in repair_plan.actions],
        "notes": list(repair_plan.notes),
        "drops": list(repair_plan.deleted_files),
    }


def _part_values(part: RepairAction) -> dict[str, Any]:
    values: dict[str, Any] = {"partition": str(part.partition), "does": _describe_part(part)}
    if isinstance(part, RefoldAction):
        rewind = part.rewind
        return values | {
            "what": "refold",
            "from": rewind.start,
            "until": rewind.first_commit_offset,
            "frontier": rewind.frontier,
            "messages": len(rewind.read_range),
            "sessions": rewind.request.sessions,
            "why": rewind.request.reason,
        }
    if isinstance(part, LiftHaltAction):
        return values | {"what": "lift", "from": part.halt.offset, "why": part.reason}
    if isinstance(part, RebuildStateAction):
        return values | {"what": "renew", "from": part.frontier, "why": part.reason}
    return values | {
        "what": "forward",
        "from": part.passed_range.start,
        "until": part.passed_range.end,
        "why": part.halt.finding,
    }


def _print_result(
    context: RepairContext, repair_plan: RepairPlan, result: RefoldResult, *, json: bool
) -> None:
    """What was done; findings that are still there are told, and fail the command."""
    name, store = repair_plan.stream, context.fold_context.ledger
    findings = unreported_findings(store, name)
    output.print_findings(name, findings, json=json)
    mark_reported(store, result.sequence)
    if result.sequence < 0:
        if repair_plan.deleted_files:
            typer.echo(
                f"{name}: damaged files that nothing needs were deleted: {len(repair_plan.deleted_files)}",
                err=json,
            )
        if repair_plan.resumed_hold:
            typer.echo(
                f"{name}: nothing is hurt any more; hold {repair_plan.resumed_hold} is released",
                err=json,
            )
        return
    ranges = {
        str(partition): [whole.start, whole.end] for partition, whole in result.ranges.items()
    }
    if result.derived_error:
        print_notice(
            f"{name}: the tables gaps and quarantine are behind; the next run catches up\n{result.derived_error}"
        )
    if json:
        values = {
            "stream": name,
            "sequence": result.sequence,
            "hold": result.hold,
            "messages": result.messages,
        }
        values |= {
            "records": result.records,
            "removed": result.removed_files,
            "ranges": ranges,
            "findings": len(findings),
        }
        values |= {"still": len(result.repeated_findings), "notes": list(repair_plan.notes)}
        typer.echo(msgspec.json.encode(values).decode())
    else:
        for place, (start, end) in ranges.items():
            typer.echo(f"{name} {place}: made again [{start}, {end})")
        typer.echo(
            f"{name}: done by entry {result.sequence}: {result.messages} messages → {result.records} records"
        )
    still = [finding for finding in result.repeated_findings if finding.level == "error"]
    for finding in still:
        print_notice(describe_remaining_finding(name, finding))
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise new_findings_error(name, errors)
    if still:
        raise IntegrityError(
            f"{name}: {len(still)} findings are still so after folding again",
            next="what they name is in the data itself: fix the producer, or wait for the sessions' next snapshots",
        )


def describe_remaining_finding(name: str, finding: Finding) -> str:
    """A finding that folding again met again, and why."""
    why = finding.cause or f"expected {finding.expected}, found {finding.found}"
    return f"{name} {finding.partition_name}: {finding.finding} at offset {finding.offset} is still so: {why}"


def _raise_for_notes(repair_plan: RepairPlan) -> None:
    if repair_plan.notes:
        raise IntegrityError(
            f"{repair_plan.stream}: {len(repair_plan.notes)} things that are hurt are not mended by this",
            next="each of the notes above says what to do about it"
            if not Options.json
            else "see `notes`",
        )
