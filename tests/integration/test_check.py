"""The gate, end to end: a real broker, Spark, great-expectations, the command line."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.integration.lab import Lab

SMALL = {
    "expectations": [
        {
            "type": "expect_column_values_to_be_between",
            "kwargs": {"column": "price", "min_value": 0},
            "meta": {"name": "price is not negative"},
        }
    ]
}


def messages(
    topic: str, partition: int, first: int, *prices: float
) -> list[tuple[str, int, str, dict[str, object]]]:
    """A snapshot, then updates of its only row."""
    body = {"type": "snapshot", "seq": first, "rows": [{"id": "a", "price": 1.0, "size": 1}]}
    sent: list[tuple[str, int, str, dict[str, object]]] = [
        (topic, partition, f"k{partition}", body)
    ]
    for number, price in enumerate(prices):
        update: dict[str, object] = {
            "type": "update",
            "seq": first + 1 + number,
            "id": "a",
            "price": price,
        }
        sent.append((topic, partition, f"k{partition}", update))
    return sent


def test_what_fails_its_check_is_not_published_until_accepted(
    lab: Lab, topic: Callable[..., str]
) -> None:
    """Bad: exit 3, publishing waits for all of it; with stop folding waits, too; accepted:
    published.
    """
    name = topic(2)
    stream = lab.stream("gate", name)
    (lab.folder / "expectations").mkdir()
    (lab.folder / "expectations" / f"{stream}.json").write_text(json.dumps(SMALL))
    lab.send([*messages(name, 0, 1, 2.0), *messages(name, 1, 1, 3.0)])
    lab.fold(stream)
    lab.send(messages(name, 1, 3, 4.0, -5.0))

    bad = lab.command("run", stream, "--check", "--json")

    assert bad.returncode == 3, bad.stderr
    folded, judged, published = map(json.loads, bad.stdout.splitlines())
    assert (folded["messages"], judged["circuit"]) == (3, "open")
    assert judged["verdict"] == {f"{name}/0": "good", f"{name}/1": "bad"}
    assert published["sequence"] == judged["checked"] == 0
    assert "1 of 5 records: -5.0" in bad.stderr
    assert prices(lab, stream) == set()
    reports = [key for key, _ in lab.store(stream).keys("reports/") if key.endswith(".html")]
    assert len(reports) == 2

    lab.stream("gate", name, on_check_failure="stop")
    refused = lab.command("run", stream)
    to = judged["to"]
    assert refused.returncode == 3
    assert "on_check_failure" in refused.stderr
    assert f"seriatim accept {stream} --sequence {to}" in refused.stderr
    assert (
        lab.command("accept", stream, "--sequence", str(to), "--because", "a rebate").returncode
        == 0
    )
    assert lab.command("publish", stream).returncode == 0
    assert prices(lab, stream) == {2.0, -5.0}


def prices(lab: Lab, stream: str) -> set[float]:
    """What readers of `current` see."""
    table = lab.table(stream, "current").to_pyarrow_dataset().to_table(use_threads=False)
    return set(table.column("price").to_pylist())
