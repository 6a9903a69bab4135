"""``demo``."""

from __future__ import annotations

from pathlib import Path

import click

from persisting.cli import topics_access
from persisting.cli.parameters import OwnPath


@click.command()
@click.option(
    "--output",
    "-o",
    type=OwnPath(),
    default="demo_output",
    show_default=True,
    metavar="DIR",
    help="Where it leaves its topics and its report; replaced if an earlier demo made it.",
)
def demo(output: str) -> None:
    """Show what Persisting does, within two minutes: producers, a kill -9, recovery, Spark, search.

    Needs persisting[all]. Leaves a folder with topics to try the other commands on.

    \b
    Examples:
      persisting demo
      persisting topics -s demo_output/queues
    """
    from persisting.demo.story import run

    topics_access.run(run(Path(output).absolute()))
