"""`seriatim diff`: two outputs compared by offset: of streams, or of replays.

Next room: steps/diff.py compares; cli/scratch.py writes what is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seriatim import config
from seriatim.cli import Options, app, say
from seriatim.cli.looking import plain, print_json
from seriatim.cli.run import Json
from seriatim.core.errors import ConfigError, IntegrityError
from seriatim.core.integrity import typed
from seriatim.core.offsets import OffsetRange, Partition

if TYPE_CHECKING:
    from seriatim.adapters.lookup import DeltaLookup
    from seriatim.steps.diff import Compared, Parting

Ranges = dict[tuple[Partition, str], OffsetRange]
Output = Annotated[str, typer.Argument(help="A stream, or a folder that `seriatim replay … --to` wrote.")]
SHOWN = 5


@app.command()
def diff(left: Output, right: Output, json: Json = False) -> None:
    """Compare the records of two outputs, offset by offset: print the first differences and count them.

    Compared is what both have folded: partitions, offsets and columns that only one of them has are named. Exit code
    0 if nothing differs, 3 if something does.

    Example: seriatim diff demo /tmp/again
    """
    from seriatim.cli.show import Progress
    from seriatim.steps.diff import compare

    Options.json = json
    (one, ones, stream), (other, others, other_stream) = _side(left), _side(right)
    tables = sorted({*one.others, *other.others})
    progress = Progress("diff", "offsets")
    try:
        done = compare(one, other, ones, others, progress)
    finally:
        progress.close()
    done.not_compared += [f"table {name}: only records are" for name in tables]
    if not done.ranges:
        raise ConfigError(
            f"{left} and {right} have no offset in common",
            cause="; ".join(done.not_compared[:5]),
            next="compare outputs of the same topics",
        )
    _tell(left, right, stream or other_stream, done, json=json)


def _side(named: str) -> tuple[DeltaLookup, Ranges, str]:
    """An output, which offsets it has folded, and the stream whose messages they are; empty: it does not say."""
    from seriatim import streams, wiring
    from seriatim.adapters import scratch
    from seriatim.adapters.lookup import DeltaLookup
    from seriatim.steps.commit import read_head

    folder = config.expanded(Path(named), named, "give the name of a stream, or a folder")
    if folder.is_dir() and (folder / scratch.MANIFEST).exists():
        manifest = scratch.manifest(folder)
        _tell_missing(named, manifest)
        return DeltaLookup(folder, None), scratch.folded(folder), str(manifest.get("replay") or "")
    if folder.is_dir() and not named.endswith(".toml") and ("/" in named or folder.is_absolute()):
        scratch.manifest(folder)
    file = streams.load(named, config.load().streams)
    head = read_head(wiring.ledger(file), file.stream.name)
    if head is None:
        raise ConfigError(f"{file.stream.name}: it was never run", next=f"seriatim run {file.stream.name}")
    accounts = head.ledger.partitions.items()
    folded = {(Partition.parse(p), a.topic_id): OffsetRange(min(a.born, a.frontier), a.frontier) for p, a in accounts}
    root = Path(file.stream.output.path)
    return DeltaLookup(root, file.stream.name, version=head.token.version()), folded, named


def _tell_missing(named: str, manifest: dict[str, Any]) -> None:
    """A replay over messages that were gone differs by them; what is damaged is told by whoever reads it whole."""
    parts = manifest.get("partitions")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and part.get("missing"):
            place = f"{part.get('topic')}/{part.get('partition')}"
            say(f"{named} was folded without {part['missing']} messages of {place}: Kafka did not have them any more")


def _tell(left: str, right: str, stream: str, done: Compared, *, json: bool) -> None:
    if json:
        print_json(_values(left, right, done))
    else:
        for note in done.not_compared:
            say(f"not compared: {note}")
        for place, whole in done.ranges.items():
            typer.echo(f"{place[0]} {whole} compared")
        for parting in done.partings[:SHOWN]:
            _show(left, right, parting)
    if not done.count:
        if not json:
            typer.echo(f"{left} and {right} do not differ: {done.records} records")
        return
    first = done.partings[0]
    session = typed(str((first.left or first.right or {}).get("session")))
    counted = f"{done.differing} records differ, {done.only_left} only in {left}, {done.only_right} only in {right}"
    raise IntegrityError(
        f"{left} and {right} differ, first at {first.partition}, offset {first.offset}, index {first.index}",
        count=counted,
        next=f"seriatim trace {typed(stream or left)} {session} --partition {first.partition}"
        f" --from {max(0, first.offset - 5)} --until {first.offset + 1}",
    )


def _values(left: str, right: str, done: Compared) -> dict[str, Any]:
    return {
        "left": left,
        "right": right,
        "compared": [
            {"topic": p.topic, "partition": p.number, "topic_id": life, "from": whole.start, "until": whole.end}
            for (p, life), whole in done.ranges.items()
        ],
        "records": done.records,
        "count": done.count,
        "differing": done.differing,
        "only_left": done.only_left,
        "only_right": done.only_right,
        "first": _parted(done.partings[0]) if done.partings else None,
        "partings": [_parted(one) for one in done.partings],
        "not_compared": done.not_compared,
    }


def _parted(one: Parting) -> dict[str, Any]:
    place = {"topic": one.partition.topic, "partition": one.partition.number}
    return {
        **place,
        "offset": one.offset,
        "index": one.index,
        "columns": one.columns,
        "left": one.left,
        "right": one.right,
    }


def _show(left: str, right: str, one: Parting) -> None:
    there = one.left or one.right or {}
    typer.secho(
        f"{one.partition} offset {one.offset} index {one.index}  session {plain(there.get('session'))}", bold=True
    )
    if one.columns and one.left and one.right:
        for name in one.columns:
            typer.echo(f"    {name:<12} {plain(one.left[name])} → {plain(one.right[name])}")
    else:
        typer.echo(f"    only in {left if one.left else right}: {plain(there)}")
