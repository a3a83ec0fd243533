"""Changes: what an entry of the ledger says about partitions.

They are built here, from what discovery found and from the results of tasks.

Next: operations/run.py commits them; ledger/model.py applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from seriatim.engine.findings import Finding, OnPoison, Tier
from seriatim.engine.holes import HolePassage, loss_mark
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.session import Counts
from seriatim.engine.task import TaskResult, read_result
from seriatim.errors import ensure, raise_broken_promise
from seriatim.ledger.model import Account, Certificate, Change, Halt, Ledger
from seriatim.operations.slicing import SlicePlan
from seriatim.ports import Explain


def birth_change(partition: Partition, account: Account, plan: SlicePlan) -> Change:
    """The change that writes a partition's account as discovery leaves it."""
    log_end = 0
    if partition in plan.ranges:
        log_end = plan.ranges[partition].end
    return Change(
        partition=partition,
        epoch=0,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        initial_frontier=account.initial_frontier,
        log_end=log_end,
    )


def discovery_changes(plan: SlicePlan, ledger: Ledger) -> Iterable[Change]:
    """What discovery alone changes: new partitions, halts, and offsets that Kafka deleted before
    they were read.
    """
    halting_findings = {
        Partition.parse(finding.partition_name): finding for finding in plan.findings
    }
    for partition in sorted({*plan.new_accounts, *plan.skipped_ranges, *halting_findings}):
        account = plan.new_accounts.get(partition) or ledger.account(partition)
        if account is None:
            raise_broken_promise("found, but unknown")
        change = replace(birth_change(partition, account, plan), epoch=account.epoch)
        finding = halting_findings.get(partition)
        if finding is not None:
            change = replace(change, halt=halt_from_finding(finding))
        skipped = plan.skipped_ranges.get(partition)
        if skipped:
            change = replace(
                change,
                until=skipped.end,
                certificate=hole_certificate(
                    partition, account, skipped, {"expired": len(skipped)}
                ),
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
    """The result for a planned range of which no message arrived. Such a range is one hole: for
    example transaction markers only, or a loss.
    """
    passage = HolePassage(partition, tier, offset_range.start)
    passage.pass_hole(offset_range, explain(partition, offset_range))
    passed_range = offset_range.until(passage.until)
    findings = [passage.halt] if passage.halt else []
    return TaskResult(
        certificate=hole_certificate(partition, account, passed_range, passage.counts),
        halt=passage.halt,
        findings=findings,
        marks=tuple(passage.marks),
    )


def unreadable_message_changes(
    unreadable_messages: Mapping[Partition, tuple[int, str]], ledger: Ledger, on_poison: OnPoison
) -> tuple[tuple[Change, ...], list[Finding]]:
    """Changes and findings for partitions that reached a message that cannot be read. They halt at
    the message, or pass over it where the stream says so.
    """
    changes = []
    findings = []
    for partition, (offset, reason) in sorted(unreadable_messages.items()):
        account = ledger.account(partition) or raise_broken_promise("stopped, but unknown")
        if account.frontier != offset:
            # The partition halted at an earlier message and did not get so far.
            continue
        finding = Finding(
            finding="poison",
            topic=partition.topic,
            partition=partition.number,
            offset=offset,
            cause=f"it cannot be read: {reason}, which does not fit (nanoseconds?)",
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
            change = _pass_over_unreadable(change)
            finding = replace(finding, level="warning")
        else:
            change = replace(change, halt=halt_from_finding(finding))
        changes.append(change)
        findings.append(finding)
    return tuple(changes), findings


def _pass_over_unreadable(change: Change) -> Change:
    """The change, moved past the one message at its frontier."""
    certificate = Certificate(
        partition=change.partition,
        epoch=change.epoch,
        start=change.frontier,
        until=change.frontier + 1,
        counts=Counts(findings={"poison": 1}),
        holes={"unreadable": 1},
    )
    return replace(change, until=certificate.until, certificate=certificate)


def change_from_result(
    partition: Partition, account: Account, result: TaskResult, log_end: int
) -> Change:
    """The change that the result of a task makes to its partition."""
    certificate = result.certificate or raise_broken_promise("a result without a certificate")
    halt = halt_from_finding(result.halt) if result.halt else None
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
        halt=halt,
        marks=result.marks,
        log_end=log_end,
    )


def halt_from_finding(finding: Finding) -> Halt:
    """The halt that the ledger remembers for a finding."""
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
    if certificate.until == offset_range.end:
        return True
    return result.halt is not None and certificate.until <= offset_range.end


def results_by_partition(contents: list[bytes]) -> dict[Partition, TaskResult]:
    """Decode what the tasks returned. The error of a failed task is raised here."""
    results: dict[Partition, TaskResult] = {}
    for content in contents:
        result = read_result(content)
        partition = result.partition or raise_broken_promise("a result says its partition")
        ensure(partition not in results, "one result per partition", partition=str(partition))
        results[partition] = result
    return results
