"""`seriatim jars`: the JARs of jars.lock, fetched and proved; and, for developers, the lock made
anew.

Next room: seriatim/embedded/jars.py keeps them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from seriatim import config
from seriatim.cli import app, print_notice

jars = typer.Typer(help="The JARs that Spark and the embedded broker need.", no_args_is_help=True)
app.add_typer(jars, name="jars")


@jars.command()
def fetch(
    group: Annotated[
        list[str] | None,
        typer.Option(
            help="spark, kafka, bench or bench-streams; may be repeated. Default: all but bench."
        ),
    ] = None,
) -> None:
    """Fetch what is missing or damaged, and prove every file by its SHA-256.

    SERIATIM_IVY_SETTINGS names your own Ivy settings file, for a mirror or credentials.

    Example: seriatim jars fetch --group spark
    """
    from seriatim.embedded import jars as cache

    settings = config.load_settings()
    for name in group or [name for name in cache.jar_groups() if not name.startswith("bench")]:
        files = cache.ensure_jars(name, settings, print_notice)
        typer.echo(f"{name}: {len(files)} JARs in {settings.home / 'jars'}")


@jars.command()
def lock(
    output: Annotated[
        Path | None, typer.Option(help="Where to write it. Default: in the package.")
    ] = None,
) -> None:
    """For developers: make jars.lock anew from jars.toml.

    Example: seriatim jars lock
    """
    from seriatim.embedded import jars as cache

    text = cache.make_lock(config.load_settings(), print_notice)
    path = output or cache.LOCK_FILE
    path.write_text(text)
    typer.echo(f"wrote {path}")
