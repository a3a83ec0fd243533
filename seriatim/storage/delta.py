"""What all our Delta tables have in common: how commits are marked, read back and compared.

Next: ledger/delta_store.py has the ledger; current_table.py, derived_tables.py and
further_tables.py have the tables that follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError

from seriatim.ports import CommitConflictError

COMMIT_METADATA_KEY = "seriatim"
"""The key of our mark in the metadata of a commit, and our app id in its transactions."""
STORAGE_ERRORS = (DeltaError, OSError, pa.ArrowException)
"""What reading or writing a Delta table raises."""
HISTORY_PAGE = 16
"""Commits that are read first. The whole history is read only if the caller goes on."""


def commit_history(table: DeltaTable) -> Iterator[dict[str, Any]]:
    """The commits of a table, newest first."""
    newest = table.history(HISTORY_PAGE)
    yield from newest
    if len(newest) == HISTORY_PAGE:
        yield from table.history()[HISTORY_PAGE:]


def last_mark(table: DeltaTable) -> dict[str, Any] | None:
    """The mark of our newest commit; None if no commit is ours."""
    for commit in commit_history(table):
        if COMMIT_METADATA_KEY in commit:
            mark: dict[str, Any] = commit[COMMIT_METADATA_KEY]
            return mark
    return None


def commit_properties(mark: dict[str, Any], sequence: int) -> CommitProperties:
    """The properties of a commit of ours.

    It has no retries: delta-rs would otherwise rebase it on commits that it was not made for.
    """
    return CommitProperties(
        custom_metadata={COMMIT_METADATA_KEY: mark},
        max_commit_retries=0,
        app_transactions=[Transaction(COMMIT_METADATA_KEY, sequence)],
    )


def add_actions_by_path(table: DeltaTable) -> dict[str, dict[str, Any]]:
    """The files of a table with what its log says about each, by path."""
    rows = pa.table(table.get_add_actions()).to_pylist()
    return {row["path"]: row for row in rows}


def column_types(schema: pa.Schema) -> dict[str, str]:
    """The types of columns by name, without what Delta does not keep: offset sizes, views, names of
    list items.
    """
    return {column.name: normalized_type(column.type) for column in schema}


def normalized_type(data_type: pa.DataType) -> str:
    """The name of one type, as in `column_types`."""
    return str(data_type).replace("large_", "").replace("_view", "").replace("element", "item")


def table_column_types(table: DeltaTable) -> dict[str, str]:
    """The same of the columns that a table has."""
    return column_types(pa.schema(table.schema().to_arrow()))


def first_line(error: BaseException) -> str:
    """The first line of an error, without the stack frames that delta-rs adds below it."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


@contextmanager
def storage_errors_as_conflict() -> Iterator[None]:
    """Raise storage errors as `CommitConflictError`: the caller decides whether to try again."""
    try:
        yield
    except STORAGE_ERRORS as error:
        raise CommitConflictError(first_line(error)) from error
