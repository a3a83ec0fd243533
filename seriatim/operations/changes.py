"""Changes: what an entry says, made of a plan's discoveries and of tasks' results.

Next room: operations/run.py commits them; ledger/model.py applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from seriatim.engine.findings import Finding, Tier
from seriatim.engine.holes import HolePassage, loss_mark
from seriatim.engine.judge import OnPoison
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.session import Counts
from seriatim.engine.task import TaskResult, read_result
from seriatim.errors import ensure, raise_broken_promise
from seriatim.ledger.model import Account, Certificate, Change, Halt, Ledger
from seriatim.operations.slicing import SlicePlan
from seriatim.ports import Explain


def birth_change(partition: Partition, account: Account, plan: SlicePlan) -> Change:
    """A partition's account as discovery leaves it."""
    return Change(
        partition=partition,
        epoch=0,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        initial_frontier=account.initial_frontier,
        log_end=plan.ranges[partition].end if partition in plan.ranges else 0,
    )


def discovery_changes(plan: SlicePlan, ledger: Ledger) -> Iterable[Change]:
    """What discovery alone changes: births, halts, offsets that were gone before they were read."""
    halts = {finding.partition_name: finding for finding in plan.findings}
    for partition in sorted(
        {*plan.new_accounts, *plan.skipped_ranges, *map(Partition.parse, halts)}
    ):
        account = (
            plan.new_accounts.get(partition)
            or ledger.account(partition)
            or raise_broken_promise("found, but unknown")
        )
        change, finding = birth_change(partition, account, plan), halts.get(str(partition))
        change = replace(change, epoch=account.epoch)
        if finding is not None:
            change = replace(change, halt=halt_from_finding(finding))
        if skipped := plan.skipped_ranges.get(partition):
            certificate = hole_certificate(partition, account, skipped, {"expired": len(skipped)})
            change = replace(
                change,
                until=skipped.end,
                certificate=certificate,
                marks=(loss_mark(skipped, "expired"),),
            )
        yield change


def hole_certificate(
    partition: Partition, account: Account, offset_range: OffsetRange, holes: dict[str, int]
) -> Certificate:
    """The certificate of a range that is one hole."""
    return Certificate(
        partition=partition,
        epoch=account.epoch,
        start=offset_range.start,
        until=offset_range.end,
        counts=Counts(),
        holes=holes,
    )


def result_of_hole(
    partition: Partition, account: Account, offset_range: OffsetRange, explain: Explain, tier: Tier
) -> TaskResult:
    """A planned range of which no message came at all is one hole: markers, say, or a loss."""
    passage = HolePassage(partition, tier, offset_range.start)
    passage.pass_hole(offset_range, explain(partition, offset_range))
    return TaskResult(
        certificate=hole_certificate(
            partition, account, offset_range.until(passage.until), passage.counts
        ),
        halt=passage.halt,
        findings=[passage.halt] if passage.halt else [],
        marks=tuple(passage.marks),
    )


def unreadable_message_changes(
    unreadable_messages: Mapping[Partition, tuple[int, str]], ledger: Ledger, on_poison: OnPoison
) -> tuple[tuple[Change, ...], list[Finding]]:
    """Partitions that reached a message nobody can read: they halt at it, or pass over it where the
    stream says so.
    """
    changes, findings = [], []
    for partition, (offset, why) in sorted(unreadable_messages.items()):
        account = ledger.account(partition) or raise_broken_promise("stopped, but unknown")
        if account.frontier != offset:  # it halted before
            continue
        cause = f"it cannot be read: {why}, which does not fit (nanoseconds?)"
        finding = Finding(
            finding="poison",
            topic=partition.topic,
            partition=partition.number,
            offset=offset,
            cause=cause,
        )
        change = Change(
            partition=partition,
            epoch=account.epoch,
            frontier=offset,
            until=offset,
            topic_id=account.topic_id,
            initial_frontier=account.initial_frontier,
        )
        if on_poison == "skip":
            counts = Counts(findings={"poison": 1})
            passed = Certificate(
                partition=partition,
                epoch=account.epoch,
                start=offset,
                until=offset + 1,
                counts=counts,
                holes={"unreadable": 1},
            )
            changes.append(replace(change, until=offset + 1, certificate=passed))
            findings.append(replace(finding, level="warning"))
        else:
            changes.append(replace(change, halt=halt_from_finding(finding)))
            findings.append(finding)
    return tuple(changes), findings


def change_from_result(
    partition: Partition, account: Account, result: TaskResult, log_end: int
) -> Change:
    """What a task's result does to its partition."""
    certificate = result.certificate or raise_broken_promise("a result without a certificate")
    return Change(
        partition=partition,
        epoch=account.epoch,
        frontier=account.frontier,
        until=certificate.until,
        topic_id=account.topic_id,
        initial_frontier=account.initial_frontier,
        certificate=certificate,
        state=result.state,
        records=result.records,
        other_records=result.other_record_files,
        quarantine_files=result.quarantine_files,
        halt=halt_from_finding(result.halt) if result.halt else None,
        marks=result.marks,
        log_end=log_end,
    )


def halt_from_finding(finding: Finding) -> Halt:
    """A finding that halts, as the ledger remembers it."""
    ensure(
        finding.finding != "truncated" or finding.log_end >= 0,
        "a truncated log says where it ends now",
    )
    return Halt(
        finding=finding.finding, offset=finding.offset, cause=finding.cause, log_end=finding.log_end
    )


def covers_range(result: TaskResult, offset_range: OffsetRange) -> bool:
    """Whether a result reaches from the start of its range to the end, or to where it halted."""
    certificate = result.certificate
    if certificate is None or certificate.start != offset_range.start:
        return False
    return certificate.until == offset_range.end or (
        result.halt is not None and certificate.until <= offset_range.end
    )


def results_by_partition(contents: list[bytes]) -> dict[Partition, TaskResult]:
    """Tasks' answers; a failed task raises here."""
    results: dict[Partition, TaskResult] = {}
    for content in contents:
        result = read_result(content)
        partition = result.partition or raise_broken_promise("a result says its partition")
        ensure(partition not in results, "one result per partition", partition=str(partition))
        results[partition] = result
    return results
