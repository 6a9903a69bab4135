"""Help and usage errors load neither Arrow nor Lance, and the list of commands is true."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.cli_runner import environment

from persisting.cli.app import cli
from persisting.cli.command_list import SECTIONS

LOADED = """
import sys
from persisting.cli.app import run
code = run(sys.argv[1:])
heavy = {"lance", "pyarrow", "numpy", "pandas", "rich", "pulsing", "pyspark", "asyncio"}
print(code, *sorted(heavy & set(sys.modules)), file=sys.__stderr__)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["topics", "--help"], 0),
        (["put", "--help"], 0),
        (["serve", "--help"], 0),
        (["nope"], 2),
        (["topics", "--nope"], 2),
        (["search"], 2),
        (["put"], 2),
    ],
    ids=str,
)
def test_help_and_usage_errors_load_no_heavy_library(words: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=True,
    )
    assert done.stderr.splitlines()[-1] == str(code)


def test_every_listed_summary_is_the_first_sentence_of_its_command() -> None:
    for entries in SECTIONS.values():
        for name, entry in entries.items():
            command = cli.commands[name]
            assert command.name == name
            assert command.get_short_help_str(1000) == entry.summary
