"""Click groups whose help never shortens the descriptions of their commands."""

from __future__ import annotations

from collections.abc import Iterable

import click

from persisting.suggestions import did_you_mean

_UNLIMITED = 1000


class CommandGroup(click.Group):
    """A group that lists its commands with their whole first sentences."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            hint = did_you_mean(name, self.commands)
            ctx.fail(f"No such command {name!r}{f'; {hint}' if hint else ''}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, command.get_short_help_str(_UNLIMITED))
            for name, command in self.commands.items()
        ]
        self.write_section(formatter, "Commands", rows)

    def write_section(
        self, formatter: click.HelpFormatter, title: str, rows: Iterable[tuple[str, str]]
    ) -> None:
        """Write a titled list of commands and their summaries; all lists of a group align."""
        width = max(len(name) for name in self.commands)
        with formatter.section(title):
            formatter.write_dl([(name.ljust(width), summary) for name, summary in rows])
