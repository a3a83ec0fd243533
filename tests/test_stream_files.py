"""Stream files: one that cannot be read, whatever is wrong with it, takes no other down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seriatim import stream_files
from seriatim.alerts.incidents import REPAIR_DAG
from seriatim.errors import ConfigError
from seriatim.ledger.commit import read_head, start_ledger
from seriatim.ledger.delta_store import DeltaLedger
from seriatim.memory import MemoryClock
from seriatim.storage.record_files import record_schema
from seriatim.storage.store import LocalStore

DAGS = Path(__file__).parent.parent / "dags"
GOOD = """topics = "t"
machine = "m:M"
[output]
path = "lake/good"
"""
WRONG = {
    "a number without end": f"topics = {'9' * 5000}",
    "brackets without end": f"topics = {'[' * 5000}",
    "a pattern that counts too far": GOOD.replace('"t"', '"a{99999999999999999999}"'),
    "a pattern too deep": GOOD.replace('"t"', f'"{"(" * 3000}{")" * 3000}"'),
    "a path too long": GOOD.replace("good", "x" * 5000),
    "a path that is none": GOOD.replace("good", "\\u0000"),
    "a home of nobody": GOOD.replace("lake/good", "~nobody-here/x"),
    "a circle of links": GOOD.replace("good", "circle"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_cannot_be_read_is_named_and_hides_no_other(what: str, tmp_path: Path) -> None:
    """All DAGs come from one file, so nothing may be raised for one stream."""
    folder = tmp_path / "streams"
    folder.mkdir()
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "circle").symlink_to("circle")
    (folder / "good.toml").write_text(GOOD)
    (folder / "bad.toml").write_text(WRONG[what])
    good, (refused,) = stream_files.load_all_streams(folder)
    assert [file.stream.name for file in good] == ["good"]
    assert "bad.toml" in refused.message
    assert "bad.toml" in refused.next
    assert len(refused.render()) < 2000


def test_a_file_that_may_not_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever is not its owner."""

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "bad.toml").write_text(GOOD)
    monkeypatch.setattr(Path, "read_text", refuse)
    _, (refused,) = stream_files.load_all_streams(tmp_path)
    assert "bad.toml: cannot be read: Permission denied" in refused.message


def test_a_stream_does_not_take_the_name_of_a_dag_of_ours(tmp_path: Path) -> None:
    """Airflow would show one or the other by turns, and the alerts would stop."""
    ours = [
        found
        for path in DAGS.glob("*.py")
        for found in re.findall(r'dag_id="(\w+)"', path.read_text())
    ]
    assert len(ours) == 3
    assert REPAIR_DAG in ours  # by this name a repair that failed is told from a run
    for name in ours:
        (tmp_path / f"{name}.toml").write_text(GOOD)
    good, refused = stream_files.load_all_streams(tmp_path)
    assert (good, len(refused)) == ([], 3)


@pytest.mark.parametrize("name", ["lake#1", "a?b", "a%20b", "x%41", "a\\\\b"])
def test_a_path_that_delta_would_read_as_a_url_is_refused(name: str, tmp_path: Path) -> None:
    """The table would be made in one folder and looked for in another; the folders above count as
    well.
    """
    with pytest.raises(ConfigError, match=r"bad.toml: output.path: .* part of a URL") as refused:
        made(tmp_path, "bad", GOOD.replace("good", name))
    assert "fix output.path in bad.toml" in refused.value.next
    (tmp_path / "link").symlink_to(tmp_path / name.replace("\\\\", "\\"))
    with pytest.raises(ConfigError, match="part of a URL"):
        made(tmp_path, "linked", GOOD.replace("lake/good", "link/lake"))


@pytest.mark.parametrize("name", ["a b", "100%", "ü", "a:b", "a+b", "'a'"])
def test_other_odd_paths_are_taken(name: str, tmp_path: Path) -> None:
    """And their ledger can be written and read."""
    root = Path(made(tmp_path, "good", GOOD.replace("good", name)).stream.output.path)
    schema = record_schema({"op": "string"})
    start_ledger(DeltaLedger(LocalStore(root), schema), MemoryClock(), "good", "a1", ())
    assert read_head(DeltaLedger(LocalStore(root), schema), "good") is not None


def test_a_stream_in_the_home_of_nobody_is_refused(tmp_path: Path) -> None:
    """As any stream that is not there."""
    with pytest.raises(ConfigError, match="no such home"):
        stream_files.load_stream("~nobody-here/x.toml", tmp_path)


HOSTILE = {
    "leaves when imported": "import sys\nsys.exit(0)",
    "leaves when made": """
import sys
from msgspec import Struct
from seriatim import Machine
class S(Struct):
    v: int = 0
class M(Machine[S, S, S]):
    def __init__(self) -> None:
        sys.exit(0)
""",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_machine_that_leaves_ends_no_command(what: str, tmp_path: Path) -> None:
    """`sys.exit(0)` in a machine's file would be a run that did nothing and ended well."""
    module = "leaving_" + what.rpartition(" ")[2]
    file = made(tmp_path, "good", GOOD.replace("m:M", f"{module}:M"))
    (tmp_path / "streams" / f"{module}.py").write_text(HOSTILE[what])
    with pytest.raises(ConfigError, match="SystemExit"):
        stream_files.load_runner(file)


DECODERS = {
    "ready": (
        "from seriatim import PlainDecoder\nclass D(PlainDecoder):\n    to_plain = bytes.hex",
        "",
    ),
    "missing": ("", "decoder_missing.py has no decoder 'D'"),
    "odd": ("class D:\n    def to_plain(self, value):\n        return {}", "has no decoder 'D'"),
    "bare": (
        "from seriatim import PlainDecoder\nclass D(PlainDecoder): ...",
        "decoder 'D' of .*decoder_bare.py has no method to_plain",
    ),
    "needy": (
        """
from seriatim import PlainDecoder
class D(PlainDecoder):
    to_plain = bytes.hex
    def __init__(self, url): ...
""",
        "decoder 'D' of .*decoder_needy.py cannot be made: TypeError: .*'url'",
    ),
    "broken": ("1 / 0", "decoder 'decoder_broken:D' fails when imported: ZeroDivisionError"),
    "leaving": ("import sys\nsys.exit(0)", "fails when imported: SystemExit"),
    "gone": (None, "decoder 'decoder_gone:D' cannot be imported: No module named 'decoder_gone'"),
}
TABLE = """topics = "t"
machine = "table"
[table]
key = ["id"]
columns = { id = "string" }
[output]
path = "lake/good"
"""


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_found_beside_its_stream_or_refused_with_what_is_missing(
    name: str, tmp_path: Path
) -> None:
    """As a machine is: the error names the file, the class and what to do."""
    source, problem = DECODERS[name]
    toml = TABLE.replace("[table]", f'decoder = "decoder_{name}:D"\n[table]')
    file = made(tmp_path, "good", toml)
    if source is not None:
        (tmp_path / "streams" / f"decoder_{name}.py").write_text(source)
    if not problem:
        assert type(stream_files.load_runner(file).decoder).__name__ == "D"
        return
    with pytest.raises(ConfigError, match=problem) as refused:
        stream_files.load_runner(file)
    assert refused.value.message.startswith("good: ")
    assert refused.value.next
    assert refused.value.exit_code == 2


def test_a_decoder_with_the_name_of_a_module_of_python_is_refused(tmp_path: Path) -> None:
    """`csv` beside the stream file would never be found."""
    file = made(tmp_path, "good", TABLE.replace("[table]", 'decoder = "csv:D"\n[table]'))
    with pytest.raises(ConfigError, match="decoder 'csv:D': 'csv' is a module of Python's own"):
        stream_files.load_runner(file)


@pytest.mark.parametrize("column", ["Topic", "OFFSET", "offset"])
def test_a_field_that_is_ours_whatever_its_case_is_refused(column: str, tmp_path: Path) -> None:
    """Delta takes both for one column."""
    module = f"taken_{column}"
    file = made(tmp_path, "good", GOOD.replace("m:M", f"{module}:M"))
    source = f"from msgspec import Struct\nfrom seriatim import Machine\nclass S(Struct):\n    {column}: int = 0\n"
    (tmp_path / "streams" / f"{module}.py").write_text(
        f"{source}class M(Machine[S, S, S]):\n    pass\n"
    )
    with pytest.raises(ConfigError, match=f"{column!r} is taken"):
        stream_files.load_runner(file)


@pytest.mark.parametrize(
    "source", ["a\0b", f"x = {'(' * 5000}", f"x = {'-' * 100_000}1", "x = (", f"x = {'9' * 5000}"]
)
def test_a_machine_that_no_parser_takes_hides_no_stream(source: str, tmp_path: Path) -> None:
    """Its docstring is missing in Airflow, and its run says what is wrong."""
    file = made(tmp_path, "good", "# All that is good.\n" + GOOD)
    (tmp_path / "streams" / "m.py").write_text(source)
    assert stream_files.describe_stream(file).startswith("All that is good.")


def made(root: Path, name: str, content: str) -> stream_files.StreamFile:
    """A stream of a project."""
    (root / "streams").mkdir(exist_ok=True)
    (root / "streams" / f"{name}.toml").write_text(content)
    return stream_files.load_stream(name, root / "streams")


def test_a_store_is_named_in_the_output_path(tmp_path: Path) -> None:
    """So that whoever opens it, also on a worker, takes the same credentials."""
    (tmp_path / "s.toml").write_text(
        'topics = "t"\nmachine = "m:M"\nkafka = "west"\nstore = "lake"\noutput.path = "s3://bucket/x/"\n'
    )
    stream = stream_files.load_stream("s", tmp_path).stream
    assert (stream.kafka, stream.output.path) == ("west", "lake+s3://bucket/x")
    assert stream_files.is_in_bucket(stream)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('store = "lake"', "store: found 'lake'"),
        ('kafka = "west-1"', "kafka: found 'west-1'"),
        ('decoder = "debezium"\nregistry = "west-1"', "registry: found 'west-1'"),
        ('registry = "west"', "registry: found 'west'"),
    ],
)
def test_a_wrong_name_of_a_connection_is_refused(tmp_path: Path, line: str, message: str) -> None:
    """A folder has no store, JSON has no registry, and a name is a part of variables."""
    (tmp_path / "s.toml").write_text(f"{line}\n{GOOD}")
    with pytest.raises(ConfigError, match=message):
        stream_files.load_stream("s", tmp_path)
