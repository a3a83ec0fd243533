"""`seriatim jars`: fetch the JARs of jars.lock and verify them. Developers make the lock with it.

Next: embedded/jars.py keeps them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from seriatim import config
from seriatim.cli import print_notice
from seriatim.embedded import jars as cache

jars = typer.Typer(
    help="Fetch the JARs that Spark and the embedded broker need.", no_args_is_help=True
)


@jars.command()
def fetch(
    group: Annotated[
        list[str] | None,
        typer.Option(
            help="spark, kafka, s3, bench or bench-streams. It may be repeated. Default: spark and kafka."
        ),
    ] = None,
) -> None:
    """Fetch JARs that are missing or damaged.

    Every file is verified by its SHA-256. SERIATIM_IVY_SETTINGS names your own Ivy settings file,
    for a mirror or for credentials.

    Example: seriatim jars fetch --group spark
    """
    settings = config.load_settings()
    groups = group
    if not groups:
        # Whoever needs another group fetches it when it is first used.
        groups = ["kafka", "spark"]
    for name in groups:
        files = cache.ensure_jars(name, settings, print_notice)
        typer.echo(f"{name}: {len(files)} JARs in {settings.home / 'jars'}")


@jars.command()
def lock(
    output: Annotated[
        Path | None, typer.Option(help="The file to write. Default: the one in the package.")
    ] = None,
) -> None:
    """Make jars.lock again from jars.toml. This command is for developers.

    Example: seriatim jars lock
    """
    text = cache.make_lock(config.load_settings(), print_notice)
    path = output or cache.LOCK_FILE
    path.write_text(text)
    typer.echo(f"wrote {path}")
