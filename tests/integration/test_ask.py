"""Producers are asked, for real: a session hurt by a lost message is right again without anybody's help."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from seriatim.adapters.producer import Asked, make_topics, send
from seriatim.demo import CollectionPoints, Fault, hurt
from tests.integration.lab import Lab, silent


def test_a_lost_message_a_request_a_snapshot(lab: Lab, topic_name: Callable[[], str]) -> None:
    """One run finds the gap and asks; the producer, which never stopped, answers; the next run makes it right."""
    # with this seed the session would send no snapshot by itself
    name, requests, client = topic_name(), topic_name(), {"bootstrap.servers": lab.servers}
    make_topics(client, {name: 2, requests: 1})
    lab.stream("asking", name, snapshot_requests=requests)
    points, asked, heard = CollectionPoints([name], 5), Asked(client, requests), list[tuple[str, str]]()
    messages = hurt(points.messages(lambda: [heard.pop()] if heard else []), [Fault("drop", 90)])
    send(client, {}, islice(messages, 150), 0, None, silent)
    first = lab.fold("asking")
    assert [finding.finding for finding in first.findings] == ["sequence gap"]
    assert (first.quarantined, first.unasked) == (1, "")
    heard += asked.wait(1, 60)
    asked.close()
    assert heard == [(name, "session-00001")]
    send(client, {}, islice(messages, 150), 0, None, silent)
    second = lab.fold("asking")
    assert (second.findings, second.quarantined) == ([], 0)
    truth = {table.name: {row: list(values) for row, values in table.rows.items()} for table in points.tables}
    found = {
        session: {row["id"]: [row["price"], row["size"]] for row in saved["state"]["rows"]}
        for (_, session), saved in lab.sessions("asking").items()
    }
    assert found == truth
    assert len(lab.kafka(requests, 1)) == 1
