"""The trigger form: what a person may ask of a run, typed and in sections. Airflow refuses at once what does not fit.

What a schema cannot say (a range that goes backward, a topic that is not there) is refused by the task `plan`, which
checks the same values again: core/request.py.

Next room: airflow/fold.py makes a command of it.
"""

from __future__ import annotations

from airflow.sdk import Param

from seriatim.core.request import (
    ACTIONS,
    EDGE_SHOWN,
    LISTED_MAX,
    MESSAGES_MAX,
    OFFSET,
    PARTITION,
    SESSION_MAX,
    TIME,
    TOPIC,
    TRACED_MAX,
)

WHAT, WHERE, HOW = "What to do", "Which messages (backfill, replay)", "How"
END = r"$(?!\n)"
"""`$` alone would let a line end through."""


def params() -> dict[str, Param]:
    """The form of a stream's DAG. Left as it is, it is a plain run."""
    return {
        "action": Param(
            "run",
            "run: fold what is not committed yet. backfill: fold a range again and replace it. replay: fold a range "
            "again into a scratch folder that the log names, changing nothing; `seriatim diff` compares it.",
            type="string",
            enum=list(ACTIONS),
            title="Action",
            section=WHAT,
        ),
        "dry_run": Param(False, "Only show what would be done.", type="boolean", title="Dry run", section=WHAT),
        "topics": _list("Topics", "Topic names, one a line. Empty: all of the stream.", TOPIC),
        "partitions": _list("Partitions", "Like prefix-a/3, one a line; instead of topics.", PARTITION),
        "from": _edge("From", f"The first message: {EDGE_SHOWN}. An offset needs exactly one partition."),
        "until": _edge("Until", "The first message not meant any more: the same. Empty: to the frontier."),
        "messages_max": Param(
            None,
            "Messages in one slice. Empty: as the stream file says.",
            type=["integer", "null"],
            minimum=1,
            maximum=MESSAGES_MAX,
            title="Slice size",
            section=HOW,
        ),
        "trace": Param(
            [],
            "Sessions to trace, one a line: what each message of theirs does is left under traces/ of the output.",
            type=["array", "null"],
            items={"type": "string", "maxLength": SESSION_MAX},
            maxItems=TRACED_MAX,
            title="Trace",
            section=HOW,
        ),
    }


def _list(title: str, description: str, pattern: str) -> Param:
    return Param(
        [],
        description,
        type=["array", "null"],
        items={"type": "string", "pattern": f"^(?:{pattern}){END}"},
        maxItems=LISTED_MAX,
        uniqueItems=True,
        title=title,
        section=WHERE,
    )


def _edge(title: str, description: str) -> Param:
    pattern = f"^(?:{OFFSET}|{TIME})?{END}"
    return Param(None, description, type=["string", "null"], pattern=pattern, title=title, section=WHERE)


def place(description: str) -> Param:
    """One partition, or none."""
    return Param(None, description, type=["string", "null"], pattern=f"^(?:{PARTITION})?{END}")


def edge(description: str) -> Param:
    """One offset, or none."""
    return Param(None, description, type=["string", "null"], pattern=f"^(?:{OFFSET})?{END}")
