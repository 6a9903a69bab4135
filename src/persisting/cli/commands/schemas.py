"""``json-schema`` and ``completion``."""

from __future__ import annotations

import json

import click

from persisting.cli import output
from persisting.cli.json_contract import CONTRACT, schema_of


@click.command("json-schema")
@click.argument("command", nargs=-1)
def json_schema(command: tuple[str, ...]) -> None:
    """Print the JSON Schema of the --json output of a command.

    Commands marked 'lines' print one value per line. Later versions may add fields; they never
    remove a field or change its meaning.

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
            [[key, "lines" if CONTRACT[key].lines else "one value"] for key in sorted(CONTRACT)],
        )
    elif name in CONTRACT:
        output.line(json.dumps(schema_of(name), indent=2))
    else:
        raise click.UsageError(
            f"{name!r} has no JSON output; these commands have: {', '.join(sorted(CONTRACT))}."
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

    completer = get_completion_class(shell)
    assert completer is not None
    root = ctx.find_root()
    output.line(completer(root.command, {}, "persisting", "_PERSISTING_COMPLETE").source())
