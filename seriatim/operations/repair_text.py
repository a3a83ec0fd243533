"""What a repair would do, as text: on the terminal, and on the page where a person approves it. Pure.

The page has a plan as JSON, so both give the values that the JSON of `seriatim repair` has.

Next: cli/repair.py makes these values; airflow/repair.py shows them for an approval.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seriatim.engine.findings import shorten


def held_by_repair(hold_id: str) -> str:
    """Which repair holds a partition, for use within a sentence."""
    return f"held by repair {hold_id}"


def fact_lines(facts: Mapping[str, str]) -> list[str]:
    """Facts one below the other, each behind its label."""
    return [f"  {label:<9} {shorten(fact)}" for label, fact in facts.items()]


def action_lines(action: Mapping[str, Any]) -> list[str]:
    """What is done to a partition, why, and what it reads."""
    return [f"{action['partition']}  {action['does']}", *fact_lines(action["facts"])]
