"""Sessions as they are stored: packed and unpacked without a loss, in a layout that stays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from seriatim.engine.session import (
    PACKED_HEAD_VERSION,
    PACKED_VERSION,
    STORED_FIELDS,
    Session,
    WaitingMessage,
    pack_session,
    unpack_session,
)
from seriatim.errors import ConfigError

INT64 = st.integers(-(2**63), 2**63 - 1)
BYTES = st.binary(max_size=40)


def stored_sessions() -> st.SearchStrategy[Session]:
    """Any session, as a store hands it out."""
    waiting_messages = st.builds(
        WaitingMessage,
        sequence=INT64,
        offset=INT64,
        timestamp=INT64,
        key=st.none() | BYTES,
        value=st.none() | BYTES,
        is_snapshot=st.booleans(),
    )
    strategies: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(STORED_FIELDS, INT64)
    strategies |= {
        "state_bytes": st.none() | BYTES,
        "state_version": st.integers(0, 2**31 - 1),
        "sequence": st.none() | INT64,
        "snapshot_sequence": st.none() | INT64,
        "snapshot_fingerprint": BYTES,
        "missing_sequences": st.lists(st.tuples(INT64, INT64), max_size=3),
        "waiting_messages": st.lists(waiting_messages, max_size=3),
        "finding": st.none() | st.text(max_size=9),
    }
    return st.builds(Session, **strategies)


@given(stored_sessions())
def test_any_session_comes_back_as_it_was_packed(session: Session) -> None:
    """What is known only while it is folded is not packed."""
    folded = replace(
        session, state={"a": object()}, is_active=True, is_touched=True, is_undoable=True
    )
    assert unpack_session(pack_session(folded)) == session


def test_version_1_is_read_as_it_was_written() -> None:
    """The bytes are those of the first version with this layout. Outputs are full of them."""
    packed = bytes.fromhex(
        "dc001201c40200ff030702c40831323334353637389292030592080991960c28cf0000018bcfe56800c4016bc4027b"
        "7dc21f07cf0000018bcfe56800cdea600109047ba367617008"
    )
    session = Session(
        state_bytes=b"\x00\xff",
        state_version=3,
        sequence=7,
        snapshot_sequence=2,
        snapshot_fingerprint=b"12345678",
        missing_sequences=[(3, 5), (8, 9)],
        waiting_messages=[
            WaitingMessage(12, 40, 1_700_000_000_000, b"k", b"{}", is_snapshot=False)
        ],
        damaged_since_offset=31,
        messages_since_snapshot=7,
        snapshot_timestamp=1_700_000_000_000,
        snapshot_distance_ms=60_000,
        first_offset=1,
        last_offset=9,
        snapshot_offset=4,
        timestamp=123,
        finding="gap",
        finding_offset=8,
    )
    assert unpack_session(packed) == session
    assert pack_session(session) == packed


def test_a_newer_version_is_refused() -> None:
    """It is nothing that this code could guess at: a newer Seriatim is to be installed."""
    version, *fields = msgspec.msgpack.decode(pack_session(Session(state_bytes=b"1")))
    assert version == PACKED_VERSION
    newer = msgspec.msgpack.encode([PACKED_HEAD_VERSION + 1, {"any": "thing"}, *fields])
    with pytest.raises(
        ConfigError, match=r"newer Seriatim: .* version 3, this one knows 2"
    ) as refused:
        unpack_session(newer)
    assert refused.value.next.startswith("install a version")


def test_damaged_content_is_no_question_of_versions() -> None:
    """A value of the known version that does not fit is not called newer."""
    with pytest.raises(msgspec.ValidationError):
        unpack_session(msgspec.msgpack.encode([PACKED_VERSION, "no bytes"]))


def test_a_session_leaves_quarantine_as_it_was() -> None:
    """Only what says that it is wrong is taken away."""
    session = Session(sequence=3, last_offset=9, finding="gap", finding_offset=5)
    session.damaged_since_offset = 5
    assert session.without_finding() == Session(sequence=3, last_offset=9)
