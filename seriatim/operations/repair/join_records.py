"""The record files of a refold, table by table: new records are joined with those that stay.

Next: operations/repair/refold.py makes the records and commits; storage/join.py writes the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from seriatim.engine.files import File
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.records import table_of_path
from seriatim.engine.session import ReplacedRecords
from seriatim.engine.task import stem_prefix
from seriatim.errors import IntegrityError
from seriatim.ledger.history import FileOrigin
from seriatim.operations.repair.refold_rules import RefoldProgress, RewriteRegion, plan_regions
from seriatim.ports import Joiner

REGION_ROWS_MAX = 1_000_000
FILES_SHOWN_MAX = 10


class DamagedInputError(Exception):
    """Record files of which a part must stay, and that are not as committed.

    The caller catches this and folds again the ranges that these files were made of, so a person
    sees it only as `error()`, where that did not help.
    """

    def __init__(self, damaged_files: Mapping[str, str]) -> None:
        super().__init__(damaged_files)
        self.damaged_files = dict(damaged_files)
        """By path, what is wrong with each."""

    def error(self, stream: str) -> IntegrityError:
        """The error for people, where folding these files again does not help either."""
        file_lines = [f"{path}: {defect}" for path, defect in self.damaged_files.items()]
        return IntegrityError(
            f"{stream}: {len(self.damaged_files)} record files that hold what is to stay are"
            " damaged",
            files="\n".join(file_lines[:FILES_SHOWN_MAX]),
            cause="they were changed or lost after they were committed, and cannot be made again"
            " from Kafka",
            next="nothing was changed. Restore these files from a backup, then repair again",
        )


def machine_changed_error(stream: str, partition: Partition, difference: str) -> IntegrityError:
    """The machine must be the one that folded a partition, and it makes something else."""
    return IntegrityError(
        f"{stream}: the machine that is deployed is not the one that folded {partition}: it makes"
        f" {difference}",
        next="nothing was changed. Without --machine unchanged history is folded again with what is"
        " deployed;\n"
        f"`seriatim replay {stream} --to DIR` and `seriatim diff` show what that would change",
    )


class RecordFileJoin(Struct, frozen=True):
    """Joins the record files of one partition of one refold."""

    joiner: Joiner
    progress: RefoldProgress
    hold: str
    unchanged_stream: str = ""
    """The name of the stream, if the new records must be the same as those that they replace."""

    def join_table(
        self, old_files: Sequence[File], new_files: Sequence[File]
    ) -> tuple[list[File], list[File]]:
        """The new files of one table, and the files that leave it.

        1. Check that the files that are to be read are as committed.
        2. Divide the offsets into regions around the files that change.
        3. Write one new file for each region.

        Raises `DamagedInputError` in step 1: damage is never copied, nor left beside the new files.
        """
        replaced = self.progress.replaced_records()
        # 1. The files in the range, and whether those of which a part stays are intact.
        range_end = max(replaced.end_offset, 1)
        files_in_range = [
            file
            for file in old_files
            if file.last_offset >= replaced.start and file.first_offset < range_end
        ]
        damaged = self.joiner.find_damaged_files(_partly_replaced(files_in_range, replaced))
        if damaged:
            raise DamagedInputError(damaged)

        # 2. The regions.
        def is_affected(file: File) -> bool:
            if replaced.covers(file.first_offset, file.last_offset):
                return True
            file_range = OffsetRange(file.first_offset, file.last_offset + 1)
            if self.joiner.has_records_in(new_files, file_range):
                return True
            return self.joiner.has_replaced_records(file, replaced)

        regions = plan_regions(files_in_range, is_affected, REGION_ROWS_MAX)
        # 3. The new files.
        joined_files: list[File] = []
        replaced_files: list[File] = []
        for number, region in enumerate(regions):
            self._refuse_changed_records(region, replaced, new_files)
            joined_file = self.joiner.join_files(
                self.progress.rewind.partition,
                self._file_stem(number),
                _partly_replaced(region.replaced_files, replaced),
                replaced,
                new_files,
                region.offset_range,
            )
            if joined_file is not None:
                joined_files.append(joined_file)
            replaced_files += region.replaced_files
        return joined_files, replaced_files

    def _file_stem(self, number: int) -> str:
        account = self.progress.rewind.account
        return f"{stem_prefix(account.epoch, account.frontier)}{self.hold}j{number}"

    def _refuse_changed_records(
        self, region: RewriteRegion, replaced: ReplacedRecords, new_files: Sequence[File]
    ) -> None:
        """Refuse records that differ from those that they replace, if they must be the same."""
        if not self.unchanged_stream:
            return
        if self.joiner.find_damaged_files(region.replaced_files):
            return  # There is nothing to compare with. This is what the refold repairs.
        offset = self.joiner.first_difference_offset(
            region.replaced_files, replaced, new_files, region.offset_range
        )
        if offset is not None:
            partition = self.progress.rewind.partition
            difference = f"other records at offset {offset}"
            raise machine_changed_error(self.unchanged_stream, partition, difference)

    def join_other_tables(
        self, origins: Iterable[FileOrigin], new_files: Mapping[str, Sequence[File]]
    ) -> tuple[dict[str, tuple[File, ...]], list[str]]:
        """The same for the further tables of a machine: the new files of each table, and the paths
        that leave.
        """
        topic_id = self.progress.rewind.account.topic_id
        old_files_by_table: dict[str, list[File]] = {table: [] for table in new_files}
        for origin in origins:
            if origin.topic_id == topic_id:
                table = table_of_path(origin.file.path)
                old_files_by_table.setdefault(table, []).append(origin.file)
        joined_by_table: dict[str, tuple[File, ...]] = {}
        removed_paths: list[str] = []
        for table, old_files in sorted(old_files_by_table.items()):
            joined_files, replaced_files = self.join_table(old_files, new_files.get(table, ()))
            if joined_files:
                joined_by_table[table] = tuple(joined_files)
            removed_paths += [file.path for file in replaced_files]
        return joined_by_table, removed_paths


def _partly_replaced(files: Iterable[File], replaced: ReplacedRecords) -> list[File]:
    """Files that may hold records that stay, and so have to be read."""
    return [file for file in files if not replaced.covers(file.first_offset, file.last_offset)]
