"""Tables: joins the tables that follow the ledger to the real adapters. An edge, as wiring.py,
which passes it on.

Next room: storage/derived_tables.py, outputs.py and current.py have the tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from seriatim import stream_files
from seriatim.errors import ConfigError
from seriatim.stream_files import StreamFile

if TYPE_CHECKING:
    from seriatim.storage.current_table import DeltaCurrent
    from seriatim.storage.derived_tables import DeltaDerived


def derived_tables(file: StreamFile) -> DeltaDerived:
    """The stream's tables gaps and quarantine, and those of further kinds of records."""
    from seriatim.storage.derived_tables import DeltaDerived
    from seriatim.storage.further_tables import DeltaOutputs
    from seriatim.storage.record_files import record_schema

    output, others = file.stream.output, stream_files.load_runner(file).other_columns
    root, schemas = (
        Path(output.path),
        {table: record_schema(columns) for table, columns in others.items()},
    )
    beside = DeltaOutputs(root, schemas, output.partition_by) if schemas else None
    return DeltaDerived(root, output.compression, beside)


def refuse_other_columns(derived: DeltaDerived) -> None:
    """Refuse a machine whose further records have other columns than their tables: before anything
    is written.
    """
    for table in derived.output_store.tables if derived.output_store else ():
        derived.output_store.applied_version(table)  # type: ignore[union-attr]  # there are tables


def table_sequences(file: StreamFile) -> dict[str, Any]:
    """As of which entry the tables that people read are, without asking the machine."""
    from seriatim.storage.audit import FileAudit
    from seriatim.storage.current_table import published_sequence

    root = Path(file.stream.output.path)
    others = {table: sequence for table, (sequence, _) in FileAudit(root).other_tables().items()}
    return {"published": published_sequence(root), "outputs": others}


def current_table(file: StreamFile) -> DeltaCurrent:
    """The stream's table `current`, for machines whose records name a key."""
    from seriatim.storage.current_table import DeltaCurrent
    from seriatim.storage.record_files import record_schema

    stream, runner = file.stream, stream_files.load_runner(file)
    if runner.row_key_spec is None:
        raise ConfigError(
            f"{stream.name}: the records of {runner.name} name no key, so there is no table `current`",
            next='say in the record\'s Struct what names a row: row_key: ClassVar = ("side", "price")',
        )
    output = stream.output
    return DeltaCurrent(
        Path(output.path),
        stream.name,
        record_schema(runner.columns),
        runner.row_key_spec,
        output.compression,
        output.keep_versions_days,
    )
