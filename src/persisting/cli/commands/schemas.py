"""``json-schema`` and ``completion``."""

from __future__ import annotations

import json
from typing import cast

import click

from persisting.cli import output
from persisting.cli.json_contract import CONTRACT, schema_of


@click.command("json-schema")
@click.argument("command", nargs=-1)
@click.pass_context
def json_schema(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Print the JSON Schema of the --json output of a command.

    Commands marked 'lines' print one value per line. Later versions may add fields; they never
    remove a field or change its meaning.

    \b
    Examples:
      persisting json-schema
      persisting json-schema topics
      persisting json-schema wal inspect
    """
    _load_all(cast(click.Group, ctx.find_root().command))
    name = " ".join(command)
    if not name:
        output.table(
            ["command", "prints"],
            [[key, "lines" if CONTRACT[key].lines else "one value"] for key in sorted(CONTRACT)],
        )
    elif name in CONTRACT:
        output.line(json.dumps(schema_of(name), indent=2))
    else:
        raise click.UsageError(
            f"{name!r} has no JSON output; these commands have: {', '.join(sorted(CONTRACT))}."
        )


def _load_all(group: click.Group) -> None:
    """Import every command, which registers what it prints."""
    for command in group.commands.values():
        if isinstance(command, click.Group):
            _load_all(command)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands and options in a shell.

    \b
    Examples:
      persisting completion bash >> ~/.bashrc
      persisting completion zsh >> ~/.zshrc
      persisting completion fish > ~/.config/fish/completions/persisting.fish
    """
    from click.shell_completion import get_completion_class

    completer = get_completion_class(shell)
    assert completer is not None
    root = ctx.find_root()
    output.line(completer(root.command, {}, "persisting", "_PERSISTING_COMPLETE").source())
