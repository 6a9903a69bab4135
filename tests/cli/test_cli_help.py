"""Every command has a description, an example and described options."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise

import click
import pytest
from support.cli_contracts import CONTRACT
from support.cli_runner import Answer, in_terminal, piped, plain

from persisting.cli.app import cli


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, one in group.commands.items():
        yield f"{path} {name}".strip(), one
        if isinstance(one, click.Group):
            yield from commands(one, f"{path} {name}".strip())


TREE = dict(commands(cli))


@pytest.mark.parametrize("name", TREE)
def test_every_command_has_help_an_example_and_described_options(
    name: str, call: Callable[..., Answer]
) -> None:
    code, out, err = call(*name.split(), "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: persisting {name}")
    assert re.search(r"Examples?:\n    ", out)
    assert f"persisting {name}" in out.partition("Example")[2]
    unexplained = [
        option.name
        for option in TREE[name].params
        if isinstance(option, click.Option) and not option.help
    ]
    assert unexplained == []


@pytest.mark.parametrize("name", TREE)
def test_every_example_in_the_help_parses(name: str) -> None:
    text = TREE[name].help or ""
    lines = [
        line.strip()
        for line in text.partition("Example")[2].splitlines()
        if "persisting " in line and not line.strip().startswith("curl")
    ]
    assert lines
    for line in lines:
        for words in _simple_commands(line):
            if words[0] == "persisting":
                _parse(cli, words[1:])


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each part of a pipe."""
    words = shlex.shlex(line, posix=True, punctuation_chars="|<>")
    words.whitespace_split = True
    found = list(words)
    cuts = [-1, *(at for at, word in enumerate(found) if word.strip("|<>") == ""), len(found)]
    for before, after in pairwise(cuts):
        yield found[before + 1 : after]


def _parse(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Parse a command line without running it; files need not exist."""
    if isinstance(command, click.Group):
        name, chosen, rest = command.resolve_command(click.Context(command, parent=parent), words)
        assert chosen is not None, name
        _parse(chosen, rest, parent)
        return
    existing = [p.type for p in command.params if isinstance(p.type, click.Path) and p.type.exists]
    for one in existing:
        one.exists = False
    try:
        command.make_context(command.name, words, parent=parent)
    finally:
        for one in existing:
            one.exists = True


def test_help_is_never_shortened() -> None:
    groups = ["", *(name for name, one in TREE.items() if isinstance(one, click.Group))]
    for group in groups:
        code, out, err = piped(*group.split(), "--help")
        assert (code, err) == (0, "")
        assert "..." not in out.replace("[ARGS]...", "")
        assert "\x1b" not in out
        commands = (TREE[group] if group else cli).commands
        for name in commands:
            assert re.search(rf"^  {name}\s+\w", out, re.MULTILINE), (group, name)


@pytest.mark.parametrize("words", [[], ["metrics"], ["wal"], ["backup"], ["pipeline"]], ids=str)
def test_group_without_a_command_shows_its_help(
    words: list[str], call: Callable[..., Answer]
) -> None:
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert err == call(*words, "--help").out


def test_unknown_command_or_option_is_a_usage_error(call: Callable[..., Answer]) -> None:
    for words in (["nope"], ["topics", "--nope"], ["head"], ["wal", "nope"], ["put"]):
        code, out, err = call(*words)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert "--help" in err


def test_json_schema_lists_every_command_with_json(
    call: Callable[..., Answer],
) -> None:
    with_json = {
        name for name, one in TREE.items() if any("--json" in option.opts for option in one.params)
    }
    assert with_json == set(CONTRACT)
    listed = call("json-schema").out.splitlines()[1:]
    assert {re.split(r"\s{2,}", line)[0] for line in listed} == with_json
    for name in with_json:
        schema = json.loads(call("json-schema", *name.split()).out)
        assert schema.get("type") == "array" or "$ref" in schema, name
    assert call("json-schema", "nope").code == 2


def test_shell_completes_commands_and_options() -> None:
    asked = {"_PERSISTING_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    found = piped(env={**asked, "COMP_WORDS": "persisting ver"}).out.split()
    assert {one.partition(",")[2] for one in found} == {"verify", "versions"}
    asked["COMP_CWORD"] = "3"
    found = piped(env={**asked, "COMP_WORDS": "persisting retain events --"}).out.split()
    assert {"plain,--dry-run", "plain,--rows", "plain,--yes"} <= set(found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_the_command(shell: str, call: Callable[..., Answer]) -> None:
    code, out, _ = call("completion", shell)
    assert code == 0
    assert "_PERSISTING_COMPLETE" in out
    assert f"{shell}_complete" in out


def test_error_is_coloured_on_a_terminal() -> None:
    answer, _ = in_terminal("describe", "missing", "-s", "/nowhere")
    assert answer.code == 3
    assert "\x1b[" in answer.err
    assert plain(answer.err).startswith("error: ")
    assert "Traceback" not in answer.err
