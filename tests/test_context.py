"""Who reads Kafka for a stream is chosen, and said with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from seriatim.config import Settings
from seriatim.context import ReaderChoice, choose_reader
from seriatim.embedded.server_process import free_port
from seriatim.errors import ConfigError, PlatformError, SeriatimError
from seriatim.kafka.spark_reader import create_remote_session
from seriatim.stream import parse_stream
from tests.test_stream import given

KERBEROS = {"sasl.mechanism": "GSSAPI"}
REMOTE = "sc://127.0.0.1:15002"


def chosen(read: str | None, kafka: dict[str, str], remote: str = "") -> ReaderChoice:
    """The choice for a stream file, Kafka's settings, and a Spark Connect server."""
    slice_settings = {} if read is None else {"read": read}
    stream = parse_stream("s", given(slice=slice_settings), "s.toml")
    settings = Settings(home=Path("/"), streams=Path("/"), spark_remote=remote)
    return choose_reader(stream, settings, kafka)


@pytest.mark.parametrize(
    ("read", "kafka", "remote", "reader", "text"),
    [
        (None, {}, "", "task", "Kafka is read by the tasks, Spark plans the slices: the default"),
        ("task", KERBEROS, "", "task", 'Spark plans the slices: slice.read = "task"'),
        ("spark", {}, "", "spark", 'Spark\'s own source: slice.read = "spark"'),
        (None, KERBEROS, "", "spark", "Spark's own source: its login is Kerberos"),
        (None, {"sasl.mechanism": "PLAIN"}, "", "task", "the default"),
        (None, {}, REMOTE, "task", "slices are cut here: under Spark Connect"),
    ],
)
def test_the_tasks_read_unless_something_asks_for_spark(
    read: str | None, kafka: dict[str, str], remote: str, reader: str, text: str
) -> None:
    """An output of before goes on with whichever reader is chosen: both give the same records."""
    choice = chosen(read, kafka, remote)
    assert choice.reader == reader
    assert text in choice.text


@pytest.mark.parametrize(("read", "kafka"), [("spark", {}), (None, KERBEROS)])
def test_spark_connect_cannot_read_by_sparks_own_source(
    read: str | None, kafka: dict[str, str]
) -> None:
    """Its batches would run on the server, which cannot commit: refused before Spark is asked."""
    with pytest.raises(ConfigError, match="Spark Connect"):
        chosen(read, kafka, REMOTE)


@pytest.mark.parametrize(
    ("address", "kind", "words"),
    [
        ("sc://127.0.0.1:{port}", PlatformError, "cannot be reached"),
        ("sc://127.0.0.1:{port}/;user_id=me", PlatformError, "cannot be reached"),
        ("sc://127.0.0.1:port", ConfigError, "spark_remote"),
        ("sc://127.0.0.1:99999", ConfigError, "spark_remote"),
    ],
)
def test_a_spark_connect_server_that_is_not_there_is_named_at_once(
    address: str, kind: type[SeriatimError], words: str
) -> None:
    """Its client would try to connect for ten minutes, without a word."""
    with pytest.raises(kind, match=words):
        create_remote_session(address.format(port=free_port()))
