"""``demo``: runs the demonstration."""

from __future__ import annotations

from pathlib import Path

import click

from persisting.cli import topics_access
from persisting.cli.parameters import LocalPath


@click.command()
@click.option(
    "--output",
    "-o",
    type=LocalPath(),
    default="demo_output",
    show_default=True,
    metavar="DIR",
    help="Folder for the topics and the report; a folder of an earlier demo is replaced.",
)
def demo(output: str) -> None:
    """Show in two minutes what Persisting does: producers, a kill -9, recovery, Spark, search.

    Needs persisting[all]. Leaves a folder with topics on which you can try the other commands.

    \b
    Examples:
      persisting demo
      persisting topics -s demo_output/queues
    """
    from persisting.demo.story import run

    topics_access.run(run(Path(output).absolute()))
