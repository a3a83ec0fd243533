"""Joining: the record files of a refold. What was made, and what stays of files that leave, table
by table.

Next room: operations/repair/refold.py makes the records and commits; storage/join.py puts files
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.record_kinds import table_of_path
from seriatim.engine.task import stem_prefix
from seriatim.errors import IntegrityError
from seriatim.ledger.history import FileOrigin
from seriatim.ledger.model import File
from seriatim.operations.repair.refold_rules import RefoldProgress, plan_regions
from seriatim.ports import Joiner

REGION_ROWS_MAX = 1_000_000


class DamagedInputError(
    Exception
):  # an answer: whoever asked folds again what these files were made of
    """Record files that stay in part, and are not as committed: by path, and why."""

    def __init__(self, damaged_files: Mapping[str, str]) -> None:
        super().__init__(damaged_files)
        self.damaged_files = dict(damaged_files)

    def error(self, stream: str) -> IntegrityError:
        """Where folding them again, too, does not help."""
        return IntegrityError(
            f"{stream}: {len(self.damaged_files)} record files that hold what is to stay are damaged",
            files="\n".join(
                f"{path}: {why}" for path, why in list(self.damaged_files.items())[:10]
            ),
            cause="they were changed or lost after they were committed, and cannot be made again from Kafka",
            next="nothing was changed. Restore these files from a backup, then repair again",
        )


def machine_changed_error(stream: str, partition: Partition, difference: str) -> IntegrityError:
    """The unchanged machine is meant, and it is not."""
    return IntegrityError(
        f"{stream}: the machine that is deployed is not the one that folded {partition}: it makes {difference}",
        next="nothing was changed. Without --machine unchanged history is folded again with what is deployed;\n"
        f"`seriatim replay {stream} --to DIR` and `seriatim diff` show what that would change",
    )


class RecordFileJoin(Struct, frozen=True):
    """Puts files together for one partition of one refold."""

    joiner: Joiner
    progress: RefoldProgress
    hold: str
    unchanged_stream: str = ""
    """The stream's name, where what is made must be what is replaced."""

    def join_table(
        self, old_files: Sequence[File], new_files: Sequence[File]
    ) -> tuple[list[File], list[File]]:
        """Files of one table, put together anew of those that are there; and those that leave it.

        Raises `DamagedInputError` where one that is to be read is not as committed: damage is never
        copied, nor left beside.
        """
        progress, joiner = self.progress, self.joiner
        rewind, replaced = progress.rewind, progress.replaced_records()
        near = [
            file
            for file in old_files
            if file.last_offset >= replaced.start
            and file.first_offset < max(replaced.end_offset, 1)
        ]
        if damaged := joiner.find_damaged_files(
            file for file in near if not replaced.covers(file.first_offset, file.last_offset)
        ):
            raise DamagedInputError(damaged)

        def is_hurt(file: File) -> bool:
            span = OffsetRange(file.first_offset, file.last_offset + 1)
            if replaced.covers(file.first_offset, file.last_offset):
                return True
            return joiner.has_records_in(new_files, span) or joiner.has_replaced_records(
                file, replaced
            )

        stem = f"{stem_prefix(rewind.account.epoch, rewind.account.frontier)}{self.hold}j"
        joined, olds = list[File](), list[File]()
        for number, region in enumerate(plan_regions(near, is_hurt, REGION_ROWS_MAX)):
            if self.unchanged_stream and not joiner.find_damaged_files(region.replaced_files):
                self._refuse_changed(
                    joiner.first_difference_offset(
                        region.replaced_files, replaced, new_files, region.offset_range
                    )
                )
            readable = [
                old
                for old in region.replaced_files
                if not replaced.covers(old.first_offset, old.last_offset)
            ]
            made = joiner.join_files(
                rewind.partition,
                f"{stem}{number}",
                readable,
                replaced,
                new_files,
                region.offset_range,
            )
            joined += [made] if made is not None else []
            olds += region.replaced_files
        return joined, olds

    def _refuse_changed(self, offset: int | None) -> None:
        if offset is not None:
            raise machine_changed_error(
                self.unchanged_stream,
                self.progress.rewind.partition,
                f"other records at offset {offset}",
            )

    def join_other_tables(
        self, origins: Iterable[FileOrigin], new_files: Mapping[str, Sequence[File]]
    ) -> tuple[dict[str, tuple[File, ...]], list[str]]:
        """The same for the machine's other tables: files put together anew, and paths that leave."""
        life = self.progress.rewind.account.topic_id
        by_table: dict[str, list[File]] = {table: [] for table in new_files}
        for made in origins:
            if made.topic_id == life:
                by_table.setdefault(table_of_path(made.file.path), []).append(made.file)
        joined = {
            table: self.join_table(files, new_files.get(table, ()))
            for table, files in sorted(by_table.items())
        }
        removed = [old.path for _, olds in joined.values() for old in olds]
        return {table: tuple(news) for table, (news, _) in joined.items() if news}, removed
