"""``json-schema`` and ``completion``."""

from __future__ import annotations

import json

import click

from persisting.cli import output
from persisting.cli.json_contract import CONTRACT, schema_of


@click.command("json-schema")
@click.argument("command", nargs=-1)
def json_schema(command: tuple[str, ...]) -> None:
    """Print the JSON Schema of what a command prints with --json.

    Commands marked 'lines' print one value on each line. Fields are added over time; none changes
    its meaning or goes.

    \b
    Examples:
      persisting json-schema
      persisting json-schema topics
      persisting json-schema wal inspect
    """
    name = " ".join(command)
    if not name:
        output.table(
            ["command", "prints"],
            [[one, "lines" if CONTRACT[one].lines else "one value"] for one in sorted(CONTRACT)],
        )
    elif name in CONTRACT:
        output.line(json.dumps(schema_of(name), indent=2))
    else:
        raise click.UsageError(
            f"There is no JSON output of {name!r}; there is of: {', '.join(sorted(CONTRACT))}."
        )


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

    found = get_completion_class(shell)
    assert found is not None
    root = ctx.find_root()
    output.line(found(root.command, {}, "persisting", "_PERSISTING_COMPLETE").source())
