"""Damaged files: what one stream has on its disk hides neither the others nor more of itself than
must be.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from seriatim.errors import IntegrityError
from seriatim.storage.status_file import StatusFiles
from seriatim.storage.store import LocalStore
from tests.web.streams_on_disk import Lake

HEADS = [
    b'{"sequence": 1e999, "sha256": "x"}',
    b'{"sequence": 99999999999999999999999, "sha256": "x"}',
    b"[" * 200_000,
]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A stream that will be hurt, and one beside it."""
    made = Lake(tmp_path)
    for name in ("orders", "other"):
        made.write_run_status(made.stream(name, partitions=1, slices=4))
    return made


@pytest.mark.parametrize("content", [b'{"stream":"\xff","at_seconds":1.0}', b"[" * 200_000])
def test_a_damaged_status_file_is_written_anew(lake: Lake, content: bytes) -> None:
    """It is as if there were none: for pages, and for the run that leaves the next one."""
    path = lake.folder / "lake" / "orders" / "status.json"
    path.write_bytes(content)
    for page in ("/", "/stream/orders"):
        assert lake.get(page).text.count("Kafka was not asked yet") == 1
    lake.write_run_status(lake.stream("orders", partitions=1, slices=0))
    assert lake.status("orders").stream == "orders"


def test_what_another_stream_left_is_not_shown_as_ones_own(lake: Lake) -> None:
    """Two files with one output path: the stream that never ran there is said to be wrong, not to
    be well.
    """
    text = (lake.streams / "orders.toml").read_text()
    (lake.streams / "late.toml").write_text(text)
    assert "late: its output path holds stream &#39;orders&#39;" in lake.get("/").text
    assert lake.get("/stream/orders").status_code == 200
    for page in ("/stream/late", "/stream/late/entry/2", "/stream/late/reports/2"):
        assert lake.get(page).status_code == 503


@pytest.mark.parametrize("content", HEADS)
def test_a_damaged_witness_hides_no_other_stream(lake: Lake, content: bytes) -> None:
    """The list has all streams; pages of this one say what cannot be read."""
    (lake.folder / "lake" / "orders" / "head.json").write_bytes(content)
    listed = lake.get("/")
    assert listed.status_code == 200
    assert "head.json cannot be read" in listed.text
    assert "/stream/other" in listed.text
    for page in ("/stream/orders", "/stream/orders/entry/2", "/stream/orders/reports/2"):
        assert lake.get(page).status_code == 503


def test_a_damaged_entry_of_the_past_does_not_hide_the_stream(lake: Lake) -> None:
    """Its page goes back as far as it can, and says why it goes no further."""
    for path in (lake.folder / "lake" / "orders" / "manifests").glob("*2-*.json.zst"):
        path.write_bytes(b"x")
    answer = lake.get("/stream/orders")
    assert answer.status_code == 200
    assert "the manifest of entry 2 cannot be read" in answer.text
    assert "/stream/orders/entry/4" in answer.text
    assert lake.get("/stream/orders/entry/2").status_code == 503


def test_a_report_that_cannot_be_read_is_said_in_words(lake: Lake) -> None:
    """A page, not a server's error."""
    path = lake.folder / "lake" / "orders" / "reports" / "0000000002.html"
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    answer = lake.get("/stream/orders/reports/2")
    assert answer.status_code == 503
    assert "cannot be read" in answer.text


def test_the_folder_of_manifests_is_listed_once(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five thousand entries a page reads fifty: it does not look through the folder for each."""
    seen: list[str] = []
    keys = LocalStore.keys
    monkeypatch.setattr(
        LocalStore, "keys", lambda store, prefix: (seen.append(prefix), keys(store, prefix))[1]
    )
    files = StatusFiles(LocalStore(lake.folder / "lake" / "orders"))
    assert [files.manifest(number).entry.sequence for number in range(5)] == [0, 1, 2, 3, 4]
    assert seen == ["manifests/"]


def test_all_manifests_are_gone_of_a_long_ledger(lake: Lake) -> None:
    """That is said, however many they were."""
    root = lake.folder / "lake" / "orders"
    shutil.rmtree(root / "manifests")
    (root / "head.json").write_text('{"sequence": 5000, "sha256": "x"}')
    with pytest.raises(IntegrityError, match="the manifest of entry 5000 cannot be read"):
        StatusFiles(LocalStore(root)).manifest(3)
