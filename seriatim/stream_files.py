"""Stream files: finds them, reads them, and loads the machines and decoders beside them.

STREAM on a command line is a name in the streams folder or a path to a TOML file. A relative output
path starts at the folder that holds `streams/`; for a stream file elsewhere, at its own folder.

Next: stream.py checks what was read.
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
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from seriatim.config import expand_user
from seriatim.engine.decoding import Decoder, JsonDecoder, PlainDecoder
from seriatim.engine.machine import Machine, Runner, UserMachine
from seriatim.engine.records import RECORD_COLUMN_NAMES
from seriatim.errors import ConfigError, SeriatimError
from seriatim.formats.debezium import debezium_decoder
from seriatim.stream import Stream, parse_stream

if TYPE_CHECKING:
    from seriatim.formats.avro import AvroValues

READ_AS_URL = re.compile(r"[#?\\]|%[0-9A-Fa-f]{2}|[\x00-\x1f\x7f]")
"""Characters that Delta's library takes for parts of a URL, however they are quoted: it would look
for the table elsewhere. And control characters, which it refuses.
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
"""Errors that a retry does not help: somebody must change rights or a setting. A full disk is not
one of them.
"""


class StreamFile(Struct, frozen=True):
    """A stream, and the folder of its file."""

    stream: Stream
    folder: str


def list_streams(folder: Path) -> list[str]:
    """The names of the streams of a folder."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def load_all_streams(folder: Path) -> tuple[list[StreamFile], list[ConfigError]]:
    """The streams of a folder whose files can be read, and the errors of the others."""
    files: list[StreamFile] = []
    errors: list[ConfigError] = []
    for name in list_streams(folder):
        try:
            files.append(load_stream(name, folder))
        except ConfigError as error:
            errors.append(error)
    return files, errors


def load_stream(stream: str, folder: Path) -> StreamFile:
    """A stream by its name in `folder`, or by the path of its TOML file."""
    path = Path(stream) if stream.endswith(".toml") else folder / f"{stream}.toml"
    path = expand_user(path, f"no stream {stream!r}", "give a name or a path").absolute()
    if not path.is_file():
        raise _unknown_stream_error(stream, path, folder)
    try:
        return _read_stream_file(path, folder)
    except ConfigError:
        raise
    # Any of these is a fault of this file: it must not stop the DAGs of the other streams.
    except (OSError, ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path.name}: cannot be read: {reason}", next=f"fix {path}") from None


def _read_stream_file(path: Path, folder: Path) -> StreamFile:
    try:
        toml_values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: not TOML: {error}", next=f"fix {path}") from None
    stream = parse_stream(path.stem, toml_values, path.name)
    if is_in_bucket(stream):
        root_url = stream.output.path.rstrip("/")
        if stream.store:
            # Wherever the path goes, also to workers, it says whose credentials open it.
            root_url = f"{stream.store}+{root_url}"
        stream = replace(stream, output=replace(stream.output, path=root_url))
        return StreamFile(stream, str(path.parent))
    advice = f"fix output.path in {path.name}"
    output_path = Path(stream.output.path.removeprefix("file://"))
    output_path = expand_user(output_path, f"{path.name}: output.path", advice)
    base_folder = path.parent
    if path.parent == folder or path.parent.name == "streams":
        base_folder = path.parent.parent
    root = base_folder / output_path
    problem = _describe_file_in_path(root) or describe_url_problem(root)
    if problem:
        message = f"{path.name}: output.path: {problem}"
        raise ConfigError(message, allowed="a folder", next=advice)
    stream = replace(stream, output=replace(stream.output, path=str(root)))
    return StreamFile(stream, str(path.parent))


def is_in_bucket(stream: Stream) -> bool:
    """Whether the output of a stream is in a bucket, and not in a folder."""
    return "://" in stream.output.path and not stream.output.path.startswith("file://")


def describe_stream(file: StreamFile) -> str:
    """A stream for people: the first comment of its file, its machine's docstring, and its file. The
    machine is not imported.
    """
    stream = file.stream
    path = Path(file.folder) / f"{stream.name}.toml"
    content = path.read_text()
    comment_lines = takewhile(lambda line: line.startswith("#"), content.splitlines())
    comment = "\n".join(line.lstrip("# ") for line in comment_lines)
    listing = f"```toml\n{content.strip()}\n```"
    paragraphs = [comment, _machine_doc(stream, file.folder), listing]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _machine_doc(stream: Stream, folder: str) -> str:
    """The docstrings of the machine's module and class, from its source."""
    module, _, class_name = stream.machine.partition(":")
    source = Path(folder) / f"{module.replace('.', '/')}.py"
    try:
        tree = ast.parse(source.read_text())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        # There is no file beside the stream's, or it is broken, which the next run reports.
        return ""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    docs = [ast.get_docstring(tree)]
    docs += [ast.get_docstring(node) for node in classes if node.name == class_name]
    return "\n\n".join(doc for doc in docs if doc)


def _describe_file_in_path(root: Path) -> str:
    """What is wrong with an output path if a part of it is a file; empty: nothing."""
    existing = next(path for path in (root, *root.parents) if path.exists())
    return "" if existing.is_dir() else f"{existing} is a file"


def refuse_unwritable_output(file: StreamFile, *, create: bool = False) -> None:
    """Refuse an output path where this user cannot write, before anything is read or folded.

    Every folder that a commit writes to is tried: another user may have run the stream before, and
    own some of them. `create`: a missing path is created, as the first run needs it; without it a
    missing path is accepted. A bucket is tried when its store is opened (context.py).
    """
    if is_in_bucket(file.stream):
        return
    root = Path(file.stream.output.path)
    if not create and not root.exists():
        return
    folder = root
    try:
        root.mkdir(parents=True, exist_ok=True)
        subfolders = sorted(path for path in root.iterdir() if path.is_dir())
        log_folders = [path / "_delta_log" for path in subfolders]
        log_folders = [path for path in log_folders if path.is_dir()]
        for folder in (root, *subfolders, *log_folders):
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
    except (KeyError, OSError):  # in a container the user may be a number without a name
        return str(os.getuid())


def describe_url_problem(folder: Path) -> str:
    """What is wrong with a path for Delta's library, links followed; empty: nothing."""
    resolved = str(folder.resolve())
    match = READ_AS_URL.search(resolved)
    if not match:
        return ""
    reaction = "reads as part of a URL" if match[0].isprintable() else "does not take"
    return f"{resolved} has {match[0]!r} in it, which Delta's library {reaction}"


def load_runner(file: StreamFile) -> Runner:
    """The stream's machine, ready to fold. Refuses a class that cannot be used."""
    stream = file.stream
    decoder = load_decoder(file)
    if stream.machine == "table":
        return stream.table_machine(decoder=decoder)
    machine_class = _machine_class(stream, file.folder)
    try:
        machine = UserMachine(
            stream.machine,
            machine_class,
            stream.sequence,
            stream.session_field,
            decoder,
            has_session_per_partition=stream.has_session_per_partition,
        )
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's own class may raise anything
        raise ConfigError(
            f"{stream.name}: machine {stream.machine!r} cannot be made: {type(error).__name__}: {error}",
            next=f"fix {machine_class.__name__}: its __init__ takes nothing, its types are what msgspec can hold",
        ) from error
    columns = set(machine.columns)
    for other_columns in machine.other_columns.values():
        columns.update(other_columns)
    taken = sorted(column for column in columns if column.casefold() in RECORD_COLUMN_NAMES)
    if taken:
        raise ConfigError(
            f"machine {stream.machine}: the record's field {taken[0]!r} is taken by the record's own column",
            next="rename the field",
        )
    return machine


def load_decoder(file: StreamFile) -> Decoder:
    """The stream's message format, ready to decode. Refuses a class that cannot be used."""
    stream = file.stream
    if stream.decoder == "json":
        return JsonDecoder()
    if stream.decoder == "debezium":
        return debezium_decoder(stream, lambda: _open_avro_values(stream.registry))
    if stream.decoder in ("avro", "protobuf", "json-schema"):
        return _registry_decoder(file)
    module, class_name = _import_class(stream, "decoder", stream.decoder, file.folder)
    decoder_class = getattr(module, class_name, None)
    source = getattr(module, "__file__", None) or module.__name__
    if not (isinstance(decoder_class, type) and issubclass(decoder_class, PlainDecoder)):
        raise ConfigError(
            f"{stream.name}: {source} has no decoder {class_name!r}",
            next=f"define class {class_name}(PlainDecoder) there; PlainDecoder is in seriatim",
        )
    if decoder_class.to_plain is PlainDecoder.to_plain:
        raise ConfigError(
            f"{stream.name}: decoder {class_name!r} of {source} has no method to_plain",
            next="write to_plain(self, value: bytes): it returns the message as a dict",
        )
    try:
        return decoder_class()
    except SeriatimError:
        raise
    except (Exception, SystemExit) as error:  # the user's own class may raise anything
        raise ConfigError(
            f"{stream.name}: decoder {class_name!r} of {source} cannot be made: {type(error).__name__}: {error}",
            next=f"fix {class_name}: its __init__ takes nothing",
        ) from error


def _open_avro_values(registry_name: str) -> AvroValues:
    from seriatim.formats.avro import AvroValues
    from seriatim.formats.registry import open_registry

    return AvroValues(open_registry(registry_name))


def _registry_decoder(file: StreamFile) -> Decoder:
    """The decoder of a format whose messages name their schema in a registry. The libraries of a
    format are imported only if a stream needs them: Airflow reads stream files again and again.
    """
    from seriatim.formats.registry import LazyRegistry

    stream = file.stream
    source = LazyRegistry(stream.registry)
    if stream.decoder == "json-schema":
        from seriatim.formats.json_schema import JsonSchemaDecoder

        return JsonSchemaDecoder(source)
    if stream.decoder == "protobuf":
        from seriatim.formats.protobuf import Descriptors, ProtobufDecoder

        name = stream.protobuf.descriptors
        content = _read_beside(file, "protobuf.descriptors", name)
        try:
            return ProtobufDecoder(source, Descriptors(content, name))
        except ValueError as error:
            raise ConfigError(
                f"{stream.name}: protobuf.descriptors: {error}",
                next="write it by protoc --include_imports --descriptor_set_out=FILE",
            ) from None
    from seriatim.formats.avro import AvroDecoder, parse_reader_schema

    if not stream.avro.reader_schema:
        return AvroDecoder(source)
    content = _read_beside(file, "avro.reader_schema", stream.avro.reader_schema)
    try:
        return AvroDecoder(source, parse_reader_schema(content))
    except ValueError as error:
        raise ConfigError(
            f"{stream.name}: avro.reader_schema: {stream.avro.reader_schema} is no schema of a"
            f" record: {error}",
            next=f"fix {stream.avro.reader_schema}",
        ) from None


def _read_beside(file: StreamFile, key: str, name: str) -> bytes:
    """A file that a key of the stream file names, beside it."""
    path = Path(file.folder) / name
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file.stream.name}: {key}: {path}: {error.strerror}",
            next=f"fix {key} in {file.stream.name}.toml",
        ) from None


def _machine_class(stream: Stream, folder: str) -> type[Machine[Any, Any, Any]]:
    """The class of a user's machine."""
    module, class_name = _import_class(stream, "machine", stream.machine, folder)
    machine_class = getattr(module, class_name, None)
    if not (isinstance(machine_class, type) and issubclass(machine_class, Machine)):
        raise ConfigError(
            f"{stream.name}: {module.__name__} has no machine {class_name!r}",
            next=f"define class {class_name}(Machine[State, Message, Record]) there",
        )
    return machine_class


def _import_class(stream: Stream, key: str, reference: str, folder: str) -> tuple[ModuleType, str]:
    """The module of a user's `module:Class`, imported from the stream's folder or from a package,
    and the name of the class. `key` is the key of the stream file that names it.
    """
    module_name, _, class_name = reference.partition(":")
    if folder not in sys.path:
        # At the end: a file beside the stream's must not replace an installed package.
        sys.path.append(folder)
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"{stream.name}: {key} {reference!r}: {module_name!r} is a module of Python's own",
            next=f"give the file another name, and {key} in the stream file as well",
        )
    try:
        return importlib.import_module(module_name), class_name
    except ImportError as error:
        raise ConfigError(
            f"{stream.name}: {key} {reference!r} cannot be imported: {error}",
            next=f"put {module_name}.py beside the stream file, or install the package that has it",
        ) from None
    except (Exception, SystemExit) as error:  # the user's own module may raise anything
        raise ConfigError(
            f"{stream.name}: {key} {reference!r} fails when imported: {type(error).__name__}: {error}",
            next=f"fix {module_name}.py",
        ) from error


def _unknown_stream_error(stream: str, path: Path, folder: Path) -> ConfigError:
    names = list_streams(folder)
    close_matches = difflib.get_close_matches(stream, names, n=1)
    hint = f"did you mean {close_matches[0]}? " if close_matches else ""
    return ConfigError(
        f"no stream {stream!r}: {path} does not exist",
        streams=", ".join(names) or "none",
        next=f"{hint}give a name or a path",
    )
