"""Joining: the record files of a refold. What was made, and what stays of files that leave, table by table.

Next room: steps/refold.py makes the records and commits; adapters/join.py puts files together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from seriatim.core.errors import IntegrityError
from seriatim.core.history import Made
from seriatim.core.ledger import File
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.outputs import table_in
from seriatim.core.refold import Progress, regions
from seriatim.ports import Joiner
from seriatim.steps.task import stem_prefix

REGION_ROWS_MAX = 1_000_000


class Unsound(Exception):  # noqa: N818  # an answer: whoever asked folds again what these files were made of
    """Record files that stay in part, and are not as committed: by path, and why."""

    def __init__(self, damaged: Mapping[str, str]) -> None:
        super().__init__(damaged)
        self.damaged = dict(damaged)

    def error(self, stream: str) -> IntegrityError:
        """Where folding them again, too, does not help."""
        return IntegrityError(
            f"{stream}: {len(self.damaged)} record files that hold what is to stay are damaged",
            files="\n".join(f"{path}: {why}" for path, why in list(self.damaged.items())[:10]),
            cause="they were changed or lost after they were committed, and cannot be made again from Kafka",
            next="nothing was changed. Restore these files from a backup, then repair again",
        )


def changed(stream: str, partition: Partition, what: str) -> IntegrityError:
    """The unchanged machine is meant, and it is not."""
    return IntegrityError(
        f"{stream}: the machine that is deployed is not the one that folded {partition}: it makes {what}",
        next="nothing was changed. Without --machine unchanged history is folded again with what is deployed;\n"
        f"`seriatim replay {stream} --to DIR` and `seriatim diff` show what that would change",
    )


class Joining(Struct, frozen=True):
    """Puts files together for one partition of one refold."""

    joiner: Joiner
    progress: Progress
    hold: str
    unchanged: str = ""
    """The stream's name, where what is made must be what is replaced."""

    def joined(self, files: Sequence[File], records: Sequence[File]) -> tuple[list[File], list[File]]:
        """Files of one table, put together anew of those that are there; and those that leave it.

        Raises `Unsound` where one that is to be read is not as committed: damage is never copied, nor left beside.
        """
        progress, joiner = self.progress, self.joiner
        rewind, replaced = progress.rewind, progress.replaced()
        near = [file for file in files if file.last >= replaced.start and file.first < max(replaced.last, 1)]
        if damaged := joiner.damaged(file for file in near if not replaced.covers(file.first, file.last)):
            raise Unsound(damaged)

        def is_hurt(file: File) -> bool:
            span = OffsetRange(file.first, file.last + 1)
            if replaced.covers(file.first, file.last):
                return True
            return joiner.any_within(records, span) or joiner.touches(file, replaced)

        stem = f"{stem_prefix(rewind.account.epoch, rewind.account.frontier)}{self.hold}j"
        joined, olds = list[File](), list[File]()
        for number, region in enumerate(regions(near, is_hurt, REGION_ROWS_MAX)):
            if self.unchanged and not joiner.damaged(region.olds):
                self._refuse_changed(joiner.parts_at(region.olds, replaced, records, region.within))
            readable = [old for old in region.olds if not replaced.covers(old.first, old.last)]
            made = joiner.join(rewind.partition, f"{stem}{number}", readable, replaced, records, region.within)
            joined += [made] if made is not None else []
            olds += region.olds
        return joined, olds

    def _refuse_changed(self, offset: int | None) -> None:
        if offset is not None:
            raise changed(self.unchanged, self.progress.rewind.partition, f"other records at offset {offset}")

    def beside(
        self, there: Iterable[Made], records: Mapping[str, Sequence[File]]
    ) -> tuple[dict[str, tuple[File, ...]], list[str]]:
        """The same for the machine's other tables: files put together anew, and paths that leave."""
        life = self.progress.rewind.account.topic_id
        by_table: dict[str, list[File]] = {table: [] for table in records}
        for made in there:
            if made.topic_id == life:
                by_table.setdefault(table_in(made.file.path), []).append(made.file)
        joined = {table: self.joined(files, records.get(table, ())) for table, files in sorted(by_table.items())}
        removed = [old.path for _, olds in joined.values() for old in olds]
        return {table: tuple(news) for table, (news, _) in joined.items() if news}, removed
