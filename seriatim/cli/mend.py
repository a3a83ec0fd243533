"""Plans of repairs, shown and applied: for people on a terminal, for logs, and for scripts.

Next room: cli/repair.py has the commands; core/repair.py the plan.
"""

from __future__ import annotations

from typing import Any

import msgspec
import typer

from seriatim.cli import Options, say, show
from seriatim.cli.stop import stoppable
from seriatim.core.errors import IntegrityError
from seriatim.core.integrity import Finding, failure, shortened
from seriatim.core.repair import Forward, Hold, Lift, Part, Plan, Refold, Renew, Request
from seriatim.steps.refold import Refolded
from seriatim.steps.repair import Mending, Repairing, plan
from seriatim.steps.tell import mark_told, untold
from seriatim.streams import StreamFile, refuse_unwritable_output
from seriatim.wiring import LazySpark


def mend(
    file: StreamFile,
    mending: Mending,
    spark: LazySpark,
    request: Request,
    *,
    apply: bool,
    approval: str,
    messages_max: int | None,
    json: bool,
) -> None:
    """Plan; then do it, where that is wanted. Repairs that died come first, each with its own plan and commit."""
    went_on = False
    if request.is_plain and request.partition:
        say(
            f"{file.stream.name} {request.partition}: its record files are proved by their digests",
            proves=request.partition,
        )
    try:
        while True:
            made = plan(mending, request)
            if not apply or not (made.parts or made.drops or made.resumes):
                if made.notes or not went_on:
                    _show(made, json=json)
                _fail_by_notes(made)
                return
            _apply(file, mending, spark, made, approval=approval, messages_max=messages_max, json=json)
            if made.request == request:
                return
            went_on = True
            if approval:
                say(f"{made.stream}: repair {made.resumes} is done; what else is hurt: seriatim repair {made.stream}")
                return
    finally:
        spark.stop()


def _apply(
    file: StreamFile,
    mending: Mending,
    spark: LazySpark,
    made: Plan,
    *,
    approval: str,
    messages_max: int | None,
    json: bool,
) -> None:
    """One plan, done and told."""
    name = file.stream.name
    refuse_unwritable_output(file)
    for hold in made.holds:
        say(f"{name}: {_held(name, hold)}", hold=hold.id)
    for part in made.parts:
        say(f"{name} {part.partition}: {_line(part)}", partition=str(part.partition))
    for note in made.notes:
        say(f"{name}: not mended by this:\n{note}", note=note)
    progress = show.Progress(name)
    repairing = Repairing(mending, progress=progress)

    def last() -> None:
        progress.close()
        hold = repairing.refolding.done.hold
        say(f"{name}: stopped under hold {hold}; the same command goes on, or: seriatim repair {name} --abandon {hold}")
        spark.kill()

    with stoppable(name, last):
        try:
            done = repairing.apply(made, messages_max or file.stream.slice.messages_max, approval)
        finally:
            progress.close()
    _show_done(mending, made, done, json=json)
    _fail_by_notes(made)


def _show(made: Plan, *, json: bool) -> None:
    """The plan, for people or scripts."""
    if json:
        typer.echo(msgspec.json.encode(_values(made)).decode())
        return
    name = made.stream
    for path in made.drops:
        typer.echo(f"{name}: {path} is damaged, and nothing needs it any more: newer files took its place")
        typer.echo(
            "  only a look at the past would read it (trace, replay); runs and readers go on, nothing has to be done"
        )
        typer.echo("  with --apply it is deleted, and verify does not report it again")
    _show_holds(made)
    if not made.parts and not made.notes:
        if made.drops:
            typer.echo(f"{name}: nothing else is hurt, as of entry {made.sequence}")
            typer.echo("\nnothing was changed. To delete it, give the same command with --apply")
        else:
            typer.echo(f"{name}: nothing is hurt, as of entry {made.sequence}; to fold again all the same, say --from")
        return
    typer.echo(f"{name}: as of entry {made.sequence}, this would be done in one commit")
    for part in made.parts:
        typer.echo(f"\n{part.partition}  {_line(part)}")
        for label, fact in _facts(part).items():
            typer.echo(f"  {label:<9} {shortened(fact)}")
    for note in made.notes:
        typer.secho(f"\nnot mended by this:\n{note}", fg=typer.colors.YELLOW)
    if made.parts or made.drops:
        again = "without --dry-run" if made.request.ranges else "with --apply"
        typer.echo(f"\nnothing was changed. To do it, give the same command {again}")


def _show_holds(made: Plan) -> None:
    """Every hold by its id, with what can be done about it."""
    for hold in made.holds:
        typer.echo(f"{made.stream}: {_held(made.stream, hold)}")
        if hold.id == made.resumes:
            typer.echo(
                "  this plan goes on with it" + ("" if made.parts else ": applied, it gives the partitions back")
            )
        elif hold in made.in_the_way:
            typer.echo("  it is in the way of this plan")
        typer.echo("")


def _held(stream: str, hold: Hold) -> str:
    facts = hold.says(stream)
    lines = [f"{facts.pop('held')} is held by repair {hold.id}, which is at work or died"]
    return "\n".join([*lines, *(f"  {label:<9} {fact}" for label, fact in facts.items())])


def _line(part: Part) -> str:
    """A part on one line."""
    if isinstance(part, Forward):
        return f"goes on at offset {part.passed.end}, without {len(part.passed)} offsets {part.passed}"
    if isinstance(part, Lift):
        return f"is read again from offset {part.halt.offset} by the next run: {part.why}"
    if isinstance(part, Renew):
        return f"goes on at offset {part.frontier} with the state that its records make, without what made it"
    rewind = part.rewind
    only = rewind.wanted.sessions
    who = "" if only is None else f", {len(only)} session{'s' * (len(only) != 1)} alone"
    further = f", then sessions that still differ, at most to {rewind.frontier}"
    whole = f"[{rewind.start}, {rewind.first_border})"
    return f"folds again {whole}{further if rewind.first_border < rewind.frontier else ''}{who}"


def _facts(part: Part) -> dict[str, str]:
    if isinstance(part, Forward | Lift):
        return {"waits": f"{part.halt.finding} at offset {part.halt.offset}", "cause": part.halt.cause}
    if isinstance(part, Renew):
        told = "records stay as they are; sessions go on by a sequence that proves them, or with their next snapshot"
        return {"why": part.why, "then": told}
    rewind = part.rewind
    facts = {
        "why": rewind.wanted.why,
        "begins": f"from the state of entry {rewind.sequence}, at offset {rewind.start}",
        "reads": f"at most {len(rewind.reads)} messages {rewind.reads}; Kafka has them",
    }
    if rewind.frontier < rewind.account.frontier:
        facts["frontier"] = f"goes back from {rewind.account.frontier} to {rewind.frontier}, where the log ends"
    return facts


def _values(made: Plan) -> dict[str, Any]:
    """The plan for scripts."""
    return {
        "stream": made.stream,
        "sequence": made.sequence,
        "approval": made.approval,
        "resumes": made.resumes,
        "holds": [{"id": hold.id, **hold.says(made.stream)} for hold in made.holds],
        "parts": [_part_values(part) for part in made.parts],
        "notes": list(made.notes),
        "drops": list(made.drops),
    }


def _part_values(part: Part) -> dict[str, Any]:
    values: dict[str, Any] = {"partition": str(part.partition), "does": _line(part)}
    if isinstance(part, Refold):
        rewind = part.rewind
        return values | {
            "what": "refold",
            "from": rewind.start,
            "until": rewind.first_border,
            "frontier": rewind.frontier,
            "messages": len(rewind.reads),
            "sessions": rewind.wanted.sessions,
            "why": rewind.wanted.why,
        }
    if isinstance(part, Lift):
        return values | {"what": "lift", "from": part.halt.offset, "why": part.why}
    if isinstance(part, Renew):
        return values | {"what": "renew", "from": part.frontier, "why": part.why}
    return values | {"what": "forward", "from": part.passed.start, "until": part.passed.end, "why": part.halt.finding}


def _show_done(mending: Mending, made: Plan, done: Refolded, *, json: bool) -> None:
    """What was done; findings that are still there are told, and fail the command."""
    name, store = made.stream, mending.world.ledger
    findings = untold(store, name)
    show.findings(name, findings, json=json)
    mark_told(store, done.sequence)
    if done.sequence < 0:
        if made.drops:
            typer.echo(f"{name}: damaged files that nothing needs were deleted: {len(made.drops)}", err=json)
        if made.resumes:
            typer.echo(f"{name}: nothing is hurt any more; hold {made.resumes} is released", err=json)
        return
    ranges = {str(partition): [whole.start, whole.end] for partition, whole in done.ranges.items()}
    if done.behind:
        say(f"{name}: the tables gaps and quarantine are behind; the next run catches up\n{done.behind}")
    if json:
        values = {"stream": name, "sequence": done.sequence, "hold": done.hold, "messages": done.messages}
        values |= {"records": done.records, "removed": done.removed, "ranges": ranges, "findings": len(findings)}
        values |= {"still": len(done.still), "notes": list(made.notes)}
        typer.echo(msgspec.json.encode(values).decode())
    else:
        for place, (start, end) in ranges.items():
            typer.echo(f"{name} {place}: made again [{start}, {end})")
        typer.echo(f"{name}: done by entry {done.sequence}: {done.messages} messages → {done.records} records")
    still = [finding for finding in done.still if finding.level == "error"]
    for finding in still:
        say(still_so(name, finding))
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise failure(name, errors)
    if still:
        raise IntegrityError(
            f"{name}: {len(still)} findings are still so after folding again",
            next="what they name is in the data itself: fix the producer, or wait for the sessions' next snapshots",
        )


def still_so(name: str, finding: Finding) -> str:
    """A finding that folding again met again, and why."""
    why = finding.cause or f"expected {finding.expected}, found {finding.found}"
    return f"{name} {finding.place}: {finding.finding} at offset {finding.offset} is still so: {why}"


def _fail_by_notes(made: Plan) -> None:
    if made.notes:
        raise IntegrityError(
            f"{made.stream}: {len(made.notes)} things that are hurt are not mended by this",
            next="each of the notes above says what to do about it" if not Options.json else "see `notes`",
        )
