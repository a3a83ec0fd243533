"""Opens the tables that follow the ledger (gaps, quarantine, current, further records) for a stream.
context.py passes these functions on.

Next: storage/derived_tables.py, storage/further_tables.py and storage/current_table.py.
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

    output = file.stream.output
    root = Path(output.path)
    other_columns = stream_files.load_runner(file).other_columns
    schemas = {table: record_schema(columns) for table, columns in other_columns.items()}
    outputs = DeltaOutputs(root, schemas, output.partition_by) if schemas else None
    return DeltaDerived(root, output.compression, outputs)


def refuse_other_columns(derived: DeltaDerived) -> None:
    """Refuse a machine whose further records have other columns than their tables, before anything
    is written.
    """
    if derived.output_store is not None:
        for table in derived.output_store.tables:
            derived.output_store.applied_version(table)  # raises if the columns differ


def table_sequences(file: StreamFile) -> dict[str, Any]:
    """The ledger entry that each table has reached, without loading the machine."""
    from seriatim.storage.audit import FileAudit
    from seriatim.storage.current_table import published_sequence

    root = Path(file.stream.output.path)
    other_tables = FileAudit(root).other_tables()
    output_sequences = {table: sequence for table, (sequence, _) in other_tables.items()}
    return {"published": published_sequence(root), "outputs": output_sequences}


def current_table(file: StreamFile) -> DeltaCurrent:
    """The stream's table `current`. Refuses a machine whose records have no key."""
    from seriatim.storage.current_table import DeltaCurrent
    from seriatim.storage.record_files import record_schema

    stream = file.stream
    runner = stream_files.load_runner(file)
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
