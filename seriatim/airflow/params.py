"""The trigger form: the fields of a run, with types and in sections. Airflow refuses at once what
does not fit.

What a schema cannot express (a range that goes backward, a topic that does not exist) is refused by
the task `plan`, which checks the same values again by operations/run_request.py.

Next: airflow/fold.py makes a command of the values.
"""

from __future__ import annotations

from airflow.sdk import Param

from seriatim.operations.run_request import (
    EDGE_EXAMPLES,
    NAMES_LISTED_MAX,
    OFFSET_PATTERN,
    PARTITION_PATTERN,
    RUN_ACTIONS,
    SESSION_NAME_MAX,
    TIME_PATTERN,
    TOPIC_PATTERN,
    TRACED_SESSIONS_MAX,
)
from seriatim.stream import MESSAGES_MAX

SECTION_ACTION = "What to do"
SECTION_MESSAGES = "Which messages (backfill, replay)"
SECTION_OPTIONS = "How"
LINE_END_PATTERN = r"$(?!\n)"
"""The end of the text. `$` alone would accept a line end before it."""


def stream_params() -> dict[str, Param]:
    """The form of a stream's DAG. Its default values are a plain run."""
    return {
        "action": Param(
            "run",
            "run: fold what is not committed yet. backfill: fold a range again and replace it. replay: fold a range "
            "again into a scratch folder that the log names, changing nothing; `seriatim diff` compares it.",
            type="string",
            enum=list(RUN_ACTIONS),
            title="Action",
            section=SECTION_ACTION,
        ),
        "dry_run": Param(
            False,
            "Only show what would be done.",
            type="boolean",
            title="Dry run",
            section=SECTION_ACTION,
        ),
        "topics": _list_param(
            "Topics", "Topic names, one a line. Empty: all of the stream.", TOPIC_PATTERN
        ),
        "partitions": _list_param(
            "Partitions", "Like prefix-a/3, one a line; instead of topics.", PARTITION_PATTERN
        ),
        "from": _edge_param(
            "From", f"The first message: {EDGE_EXAMPLES}. An offset needs exactly one partition."
        ),
        "until": _edge_param(
            "Until", "The first message not meant any more: the same. Empty: to the frontier."
        ),
        "messages_max": Param(
            None,
            "Messages in one slice. Empty: as the stream file says.",
            type=["integer", "null"],
            minimum=1,
            maximum=MESSAGES_MAX,
            title="Slice size",
            section=SECTION_OPTIONS,
        ),
        "trace": Param(
            [],
            "Sessions to trace, one a line: what each of their messages does is written to traces/ of the output.",
            type=["array", "null"],
            items={"type": "string", "maxLength": SESSION_NAME_MAX},
            maxItems=TRACED_SESSIONS_MAX,
            title="Trace",
            section=SECTION_OPTIONS,
        ),
    }


# JSON Schema searches for a pattern anywhere in a text, so each pattern below is anchored.
def _list_param(title: str, description: str, pattern: str) -> Param:
    return Param(
        [],
        description,
        type=["array", "null"],
        items={"type": "string", "pattern": f"^(?:{pattern}){LINE_END_PATTERN}"},
        maxItems=NAMES_LISTED_MAX,
        uniqueItems=True,
        title=title,
        section=SECTION_MESSAGES,
    )


def _edge_param(title: str, description: str) -> Param:
    pattern = f"^(?:{OFFSET_PATTERN}|{TIME_PATTERN})?{LINE_END_PATTERN}"
    return Param(
        None,
        description,
        type=["string", "null"],
        pattern=pattern,
        title=title,
        section=SECTION_MESSAGES,
    )


def partition_param(description: str) -> Param:
    """A field for one partition, or none."""
    return Param(
        None,
        description,
        type=["string", "null"],
        pattern=f"^(?:{PARTITION_PATTERN})?{LINE_END_PATTERN}",
    )


def offset_param(description: str) -> Param:
    """A field for one offset, or none."""
    return Param(
        None,
        description,
        type=["string", "null"],
        pattern=f"^(?:{OFFSET_PATTERN})?{LINE_END_PATTERN}",
    )
