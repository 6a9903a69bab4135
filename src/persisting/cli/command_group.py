"""Click groups whose help never shortens the descriptions of their commands."""

from __future__ import annotations

from collections.abc import Iterable

import click

_UNLIMITED = 1000


class CommandGroup(click.Group):
    """A group that lists its commands with their whole first sentences."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.write_section(formatter, "Commands", self.commands.values())

    def write_section(
        self, formatter: click.HelpFormatter, title: str, commands: Iterable[click.Command]
    ) -> None:
        """Write a titled list of commands; all lists of a group align."""
        width = max(len(name) for name in self.commands)
        with formatter.section(title):
            formatter.write_dl(
                [
                    ((command.name or "").ljust(width), command.get_short_help_str(_UNLIMITED))
                    for command in commands
                ]
            )
