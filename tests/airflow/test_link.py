"""A task leads to what its run did: a button in Airflow, with the run's own page behind it."""

from __future__ import annotations

from pathlib import Path

from tests.dags.bag import ask, write_stream


def test_fold_and_check_lead_to_the_page_of_their_run(tmp_path: Path) -> None:
    """By the plugin's address, whatever the run is called; it survives being kept in Airflow's
    database.
    """
    write_stream(tmp_path / "streams", "orders")
    code = (
        "from types import SimpleNamespace as S\n"
        "from airflow.serialization.serialized_objects import DagSerialization as D\n"
        "run = S(dag_id='orders', run_id='scheduled__2026-11-16T15:30:00+00:00')\n"
        "links = {t.task_id: [one.get_link(t, ti_key=run) for one in t.operator_extra_links]"
        " for t in bag.dags['orders'].tasks}\n"
        "kept = {t.task_id: list(t.extra_links) for t in D.from_dict(D.to_dict(bag.dags['orders'])).tasks}\n"
        "print(json.dumps([links, kept]))"
    )
    links, kept = ask(tmp_path, code, AIRFLOW__API__BASE_URL="https://airflow.example/at/")
    wanted = "https://airflow.example/at/seriatim/dag/orders/run?run_id=scheduled__2026-11-16T15%3A30%3A00%2B00%3A00"
    assert {task for task, found in links.items() if found == [wanted]} == {"fold", "check"}
    assert {task for task, found in kept.items() if "Seriatim: what this run did" in found} >= {
        "fold",
        "check",
    }
