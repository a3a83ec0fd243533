"""Stream files: find them, read them, load the machines beside them.

STREAM on a command line is a name in the streams folder or a path to a TOML file. An output path
that is not absolute is taken from the folder that holds `streams/`; for a stream file elsewhere,
from its own.

Next room: stream.py checks what was read.
"""

from __future__ import annotations

import ast
import difflib
import errno
import getpass
import importlib
import os
import re
import sys
import tempfile
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from seriatim.config import expand_user
from seriatim.engine.machine import Machine, Runner, UserMachine
from seriatim.errors import ConfigError
from seriatim.stream import RECORD_COLUMNS, Stream, parse_stream

READ_AS_URL = re.compile(r"[#?\\]|%[0-9A-Fa-f]{2}|[\x00-\x1f\x7f]")
"""What Delta's library takes for the parts of a URL, however it is quoted: it would look for the
table elsewhere. And control characters, which it refuses.
"""

NOT_WRITABLE = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
"""What a retry does not mend: somebody must change rights or a setting. A full disk, say, is not
among it.
"""


class StreamFile(Struct, frozen=True):
    """A stream and where it was read from."""

    stream: Stream
    folder: str


def list_streams(folder: Path) -> list[str]:
    """The streams of a folder."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def load_all_streams(folder: Path) -> tuple[list[StreamFile], list[ConfigError]]:
    """The streams of a folder whose files can be read, and what is wrong with the others."""
    good, bad = list[StreamFile](), list[ConfigError]()
    for name in list_streams(folder):
        try:
            good.append(load_stream(name, folder))
        except ConfigError as error:
            bad.append(error)
    return good, bad


def load_stream(stream: str, folder: Path) -> StreamFile:
    """A stream by name in `folder`, or by path to its TOML file."""
    path = Path(stream) if stream.endswith(".toml") else folder / f"{stream}.toml"
    path = expand_user(path, f"no stream {stream!r}", "give a name or a path").absolute()
    if not path.is_file():
        raise _unknown_stream_error(stream, path, folder)
    try:
        return _read_stream_file(path, folder)
    except ConfigError:
        raise
    except (
        OSError,
        ValueError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
    ) as error:  # whatever it is, it is this file's
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path.name}: cannot be read: {why}", next=f"fix {path}") from None


def _read_stream_file(path: Path, folder: Path) -> StreamFile:
    try:
        given = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: not TOML: {error}", next=f"fix {path}") from None
    checked = parse_stream(path.stem, given, path.name)
    fix = f"fix output.path in {path.name}"
    output = expand_user(
        Path(checked.output.path.removeprefix("file://")), f"{path.name}: output.path", fix
    )
    base = (
        path.parent.parent
        if path.parent in (folder, path.parent.with_name("streams"))
        else path.parent
    )
    root = str(base / output)
    if trouble := _describe_file_in_path(base / output) or describe_url_problem(base / output):
        raise ConfigError(f"{path.name}: output.path: {trouble}", allowed="a folder", next=fix)
    return StreamFile(replace(checked, output=replace(checked.output, path=root)), str(path.parent))


def describe_stream(file: StreamFile) -> str:
    """What a stream is, for people: its file's first comment, its machine's docstring, its file.
    Imports no machine.
    """
    stream = file.stream
    path = Path(file.folder) / f"{stream.name}.toml"
    content = path.read_text()
    comment = [
        line.lstrip("# ")
        for line in takewhile(lambda line: line.startswith("#"), content.splitlines())
    ]
    parts = [
        "\n".join(comment),
        _machine_doc(stream, file.folder),
        f"```toml\n{content.strip()}\n```",
    ]
    return "\n\n".join(part for part in parts if part)


def _machine_doc(stream: Stream, folder: str) -> str:
    module, _, name = stream.machine.partition(":")
    source = Path(folder) / f"{module.replace('.', '/')}.py"
    try:
        tree = ast.parse(source.read_text())
    except (
        OSError,
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # no file beside it, or a run will refuse it
        return ""
    kinds = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    docs = [ast.get_docstring(tree), *(ast.get_docstring(kind) for kind in kinds)]
    return "\n\n".join(doc for doc in docs if doc)


def _describe_file_in_path(root: Path) -> str:
    """What is a file where the output path needs a folder; nothing where it is one, or can become
    one.
    """
    there = next(path for path in (root, *root.parents) if path.exists())
    return "" if there.is_dir() else f"{there} is a file"


def refuse_unwritable_output(file: StreamFile, *, create: bool = False) -> None:
    """Refuse an output path where this user cannot write, before anything is read or folded for it.

    Every folder that a commit writes to is tried: somebody else may have run the stream once, and
    own some of them. `create`: a path that is not there yet is made, as a first run needs it; else
    there is nothing to refuse.
    """
    root = Path(file.stream.output.path)
    if not create and not root.exists():
        return
    folder = root
    try:
        root.mkdir(parents=True, exist_ok=True)
        rooms = sorted(path for path in root.iterdir() if path.is_dir())
        logs = [room / "_delta_log" for room in rooms if (room / "_delta_log").is_dir()]
        for folder in (root, *rooms, *logs):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        raise ConfigError(
            f"{file.stream.name}: user {_user_name()} cannot write to its output path: {folder}: {error.strerror}",
            next=f"give this user the right to write there, or fix output.path in {file.stream.name}.toml",
        ) from None


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run us as a number that nobody named
        return str(os.getuid())


def describe_url_problem(folder: Path) -> str:
    """What no Delta table can have in its path, links followed."""
    whole = str(folder.resolve())
    found = READ_AS_URL.search(whole)
    if not found:
        return ""
    why = "reads as part of a URL" if found[0].isprintable() else "does not take"
    return f"{whole} has {found[0]!r} in it, which Delta's library {why}"


def load_runner(file: StreamFile) -> Runner:
    """The stream's machine, ready to be folded."""
    stream = file.stream
    if stream.machine == "table":
        return stream.table_machine()
    kind = _machine_class(stream, file.folder)
    try:
        machine = UserMachine(stream.machine, kind, stream.sequence, stream.session_field)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's own class may raise anything
        raise ConfigError(
            f"{stream.name}: machine {stream.machine!r} cannot be made: {type(error).__name__}: {error}",
            next=f"fix {kind.__name__}: its __init__ takes nothing, its types are what msgspec can hold",
        ) from error
    named = {
        *machine.columns,
        *(column for columns in machine.other_columns.values() for column in columns),
    }
    taken = sorted(column for column in named if column.casefold() in RECORD_COLUMNS)
    if taken:
        raise ConfigError(
            f"machine {stream.machine}: the record's field {taken[0]!r} is taken by the record's own column",
            next="rename the field",
        )
    return machine


def _machine_class(stream: Stream, folder: str) -> type[Machine[Any, Any, Any]]:
    module_name, _, class_name = stream.machine.partition(":")
    if folder not in sys.path:
        sys.path.append(folder)
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"{stream.name}: machine {stream.machine!r}: {module_name!r} is a module of Python's own",
            next="give the file another name, and machine in the stream file as well",
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{stream.name}: machine {stream.machine!r} cannot be imported: {error}",
            next=f"put {module_name}.py beside the stream file, or install the package that has it",
        ) from None
    except (Exception, SystemExit) as error:  # the user's own module may raise anything
        raise ConfigError(
            f"{stream.name}: machine {stream.machine!r} fails when imported: {type(error).__name__}: {error}",
            next=f"fix {module_name}.py",
        ) from error
    kind = getattr(module, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, Machine)):
        raise ConfigError(
            f"{stream.name}: {module_name} has no machine {class_name!r}",
            next=f"define class {class_name}(Machine[State, Message, Record]) there",
        )
    return kind


def _unknown_stream_error(stream: str, path: Path, folder: Path) -> ConfigError:
    known = list_streams(folder)
    close = difflib.get_close_matches(stream, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    listed = ", ".join(known) if known else "none"
    missing = f"no stream {stream!r}: {path} does not exist"
    return ConfigError(missing, streams=listed, next=f"{hint}give a name or a path")
