"""Changes: what an entry says, made of a plan's discoveries and of tasks' results.

Next room: steps/fold.py commits them; core/ledger.py applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from seriatim.core.errors import broken, ensure
from seriatim.core.holes import Passage, mark
from seriatim.core.integrity import Finding, Tier
from seriatim.core.judge import OnPoison
from seriatim.core.ledger import Account, Certificate, Change, Halt, Ledger
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.session import Counts
from seriatim.core.slice import Plan
from seriatim.ports import Explain
from seriatim.steps.task import Result, read_result


def birth(partition: Partition, account: Account, plan: Plan) -> Change:
    """A partition's account as discovery leaves it."""
    return Change(
        partition=partition,
        epoch=0,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        born=account.born,
        log_end=plan.ranges[partition].end if partition in plan.ranges else 0,
    )


def found(plan: Plan, ledger: Ledger) -> Iterable[Change]:
    """What discovery alone changes: births, halts, offsets that were gone before they were read."""
    halts = {finding.place: finding for finding in plan.findings}
    for partition in sorted({*plan.born, *plan.skipped, *map(Partition.parse, halts)}):
        account = plan.born.get(partition) or ledger.account(partition) or broken("found, but unknown")
        change, finding = birth(partition, account, plan), halts.get(str(partition))
        change = replace(change, epoch=account.epoch)
        if finding is not None:
            change = replace(change, halt=halt_of(finding))
        if skipped := plan.skipped.get(partition):
            certificate = hole_certificate(partition, account, skipped, {"expired": len(skipped)})
            change = replace(change, until=skipped.end, certificate=certificate, marks=(mark(skipped, "expired"),))
        yield change


def hole_certificate(partition: Partition, account: Account, whole: OffsetRange, holes: dict[str, int]) -> Certificate:
    """The certificate of a range that is one hole."""
    return Certificate(
        partition=partition, epoch=account.epoch, start=whole.start, until=whole.end, counts=Counts(), holes=holes
    )


def nothing_came(partition: Partition, account: Account, whole: OffsetRange, explain: Explain, tier: Tier) -> Result:
    """A planned range of which no message came at all is one hole: markers, say, or a loss."""
    passage = Passage(partition, tier, whole.start)
    passage.over(whole, explain(partition, whole))
    return Result(
        certificate=hole_certificate(partition, account, whole.until(passage.until), passage.counts),
        halt=passage.halt,
        findings=[passage.halt] if passage.halt else [],
        marks=tuple(passage.marks),
    )


def stopped(
    stops: Mapping[Partition, tuple[int, str]], ledger: Ledger, on_poison: OnPoison
) -> tuple[tuple[Change, ...], list[Finding]]:
    """Partitions that reached a message nobody can read: they halt at it, or pass over it where the stream says so."""
    changes, findings = [], []
    for partition, (offset, why) in sorted(stops.items()):
        account = ledger.account(partition) or broken("stopped, but unknown")
        if account.frontier != offset:  # it halted before
            continue
        cause = f"it cannot be read: {why}, which does not fit (nanoseconds?)"
        finding = Finding(
            finding="poison", topic=partition.topic, partition=partition.number, offset=offset, cause=cause
        )
        change = Change(
            partition=partition,
            epoch=account.epoch,
            frontier=offset,
            until=offset,
            topic_id=account.topic_id,
            born=account.born,
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
            changes.append(replace(change, halt=halt_of(finding)))
            findings.append(finding)
    return tuple(changes), findings


def change_of(partition: Partition, account: Account, result: Result, log_end: int) -> Change:
    """What a task's result does to its partition."""
    certificate = result.certificate or broken("a result without a certificate")
    return Change(
        partition=partition,
        epoch=account.epoch,
        frontier=account.frontier,
        until=certificate.until,
        topic_id=account.topic_id,
        born=account.born,
        certificate=certificate,
        state=result.state,
        records=result.records,
        others=result.others,
        kept=result.kept,
        halt=halt_of(result.halt) if result.halt else None,
        marks=result.marks,
        log_end=log_end,
    )


def halt_of(finding: Finding) -> Halt:
    """A finding that halts, as the ledger remembers it."""
    ensure(finding.finding != "truncated" or finding.log_end >= 0, "a truncated log says where it ends now")
    return Halt(finding=finding.finding, offset=finding.offset, cause=finding.cause, log_end=finding.log_end)


def covers(result: Result, whole: OffsetRange) -> bool:
    """Whether a result reaches from the start of its range to the end, or to where it halted."""
    certificate = result.certificate
    if certificate is None or certificate.start != whole.start:
        return False
    return certificate.until == whole.end or (result.halt is not None and certificate.until <= whole.end)


def by_partition(contents: list[bytes]) -> dict[Partition, Result]:
    """Tasks' answers; a failed task raises here."""
    results: dict[Partition, Result] = {}
    for content in contents:
        result = read_result(content)
        partition = result.partition or broken("a result says its partition")
        ensure(partition not in results, "one result per partition", partition=str(partition))
        results[partition] = result
    return results
