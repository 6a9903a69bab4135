"""What docs/reference/cli.md says of every command, and that its examples run."""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
import gzip
import inspect
import json
import logging
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import click
import lance
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.children import interrupt
from support.doc_pages import DOCS, ROOT, blocks, both, code, english_pages, table_with

from persisting.cli import exit_codes, output
from persisting.cli.app import cli, run
from persisting.cli.json_contract import CONTRACT
from persisting.queue import read_queue, write_queue
from persisting.topic.spec import DEFAULT_BUCKETS, DEFAULT_COLUMN

PAGE = DOCS / "reference/cli.md"
pages = pytest.mark.parametrize("page", both("reference/cli.md"), ids=["en", "zh"])

_HEADING = re.compile(r"^(#{2,3}) (.+?)(?: \{ #([\w-]+) \})?$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")


def commands() -> dict[str, click.Command]:
    """Every command and group by its path."""
    found: dict[str, click.Command] = {}

    def walk(group: click.Group, above: str) -> None:
        for name, one in group.commands.items():
            found[f"{above}{name}"] = one
            if isinstance(one, click.Group):
                walk(one, f"{above}{name} ")

    walk(cli, "")
    return found


COMMANDS = commands()


def sections(page: Path) -> dict[str, str]:
    """The text below each heading, up to the next one; by the heading and by its anchor."""
    text = page.read_text("utf-8")
    places = list(_HEADING.finditer(text))
    found = {}
    for at, match in enumerate(places):
        end = places[at + 1].start() if at + 1 < len(places) else len(text)
        found[match[2]] = found[match[3] or match[2].lower().replace(" ", "-")] = text[
            match.end() : end
        ]
    return found


def rows(section: str, columns: int) -> list[list[str]]:
    """The rows of the tables of a section that have this many columns."""
    found = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `") and len(cells) == columns:
            found.append(cells)
    return found


def options(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their long names, or the only one they have."""
    return {
        next((name for name in one.opts if name.startswith("--")), one.opts[0]): one
        for one in command.params
        if isinstance(one, click.Option)
    }


def defaults(section: str) -> dict[str, str]:
    """The options that a section lists, with their defaults."""
    found = {}
    for first, _, default in rows(section, 3):
        names = _CODE.findall(first)
        long = [name for name in names if name.startswith("--")]
        found |= dict.fromkeys(long or names, default)
    return found


@pages
def test_every_command_has_a_heading_at_its_level_and_nothing_else_is_called_one(page: Path):
    levels = {match[2]: len(match[1]) for match in _HEADING.finditer(page.read_text("utf-8"))}
    for name in COMMANDS:
        assert levels.pop(name, None) == 2 + name.count(" "), f"{page.name} has no heading {name!r}"
    others = ["Every command", "Values", "JSON", "Exit codes", "Environment"]
    assert len(levels) == len(others)
    if not page.name.endswith(".zh.md"):
        assert list(levels) == others


@pages
def test_every_option_and_argument_of_a_command_is_in_its_section(page: Path):
    known = sections(page)
    for name, command in COMMANDS.items():
        listed = defaults(known[name])
        shared = {"--master", "--conf", "--storage", "--json"}
        assert set(listed) == (shared if name == "pipeline" else set(options(command))), name
        for one in command.params:
            if isinstance(one, click.Argument):
                assert (one.name or "").upper() in known[name], name
        for option, one in options(command).items():
            told_once = option in ("--storage", "--master")
            if isinstance(one.default, (int, float, str)) and one.default and not told_once:
                assert code(listed[option]) == str(one.default), (name, option)
    for name, option in (("every-command", "--storage"), ("pipeline", "--master")):
        real = options(COMMANDS["pipeline run"])[option].default
        assert code(defaults(known[name])[option]) == real


@pages
def test_documented_defaults_of_options_are_those_of_the_library(page: Path):
    from persisting.spark.jobs.split_job import SHARES

    known = sections(page)
    for name in ("create", "put", "import", "pipeline ingest", "pipeline run"):
        listed = {code(first): code(default) for first, _, default in rows(known[name], 3)}
        assert listed["--buckets"] == str(DEFAULT_BUCKETS)
        assert listed["--bucket-column"] == DEFAULT_COLUMN
    (share,) = [row[2] for row in rows(known["pipeline split"], 3) if code(row[0]) == "--share"]
    assert _CODE.findall(share) == [f"{part}={value}" for part, value in SHARES.items()]


def fields(kind: Any, above: str = "") -> list[str]:
    """The fields of a Struct; those of a list of Structs as ``name[].field``."""
    found = []
    for one in msgspec.structs.fields(kind):
        inner = get_args(one.type)[0] if get_origin(one.type) is list else None
        if inspect.isclass(inner) and issubclass(inner, msgspec.Struct):
            found += fields(inner, f"{above}{one.encode_name}[].")
        else:
            found.append(above + one.encode_name)
    return found


FORMS = {
    "lines": ("one object on each line", "每行一个对象"),
    "list": ("a list of objects", "一个对象列表"),
    "one": ("one object", "一个对象"),
}


@pages
def test_every_field_of_the_json_of_a_command_is_listed(page: Path):
    known = sections(page)
    for name in COMMANDS:
        (said,) = re.findall(r"^`--json`[:：] ?(.+)$", known[name], re.MULTILINE) or [""]
        assert bool(said) == (name in CONTRACT), name
        if not said:
            continue
        printed = CONTRACT[name]
        kind = get_args(printed.type)[0] if printed.many else printed.type
        form = "lines" if printed.lines else "list" if printed.many else "one"
        assert re.split("[,.，。]", said)[0] in FORMS[form], name
        link = re.search(r"\(#([\w-]+)\)", said)
        section = known[link[1]] if link else known[name]
        assert sorted(code(row[0]) for row in rows(section, 2)) == sorted(fields(kind)), name


@pages
def test_the_exit_codes_and_their_errors_are_the_codes(page: Path):
    table = table_with(page, "0", "130")
    known = {value for name, value in vars(exit_codes).items() if name.isupper() and name[0] != "_"}
    assert [int(code(row[0])) for row in table] == sorted(known)
    listed = {name: int(code(row[0])) for row in table for name in _CODE.findall(row[2])}
    assert listed == {kind.__name__: number for kind, number in exit_codes._BY_ERROR}


@pages
def test_the_variables_of_the_environment_are_listed(page: Path):
    listed = [code(row[0]) for row in table_with(page, "PERSISTING_STORAGE")]
    names = ["STORAGE", "DEBUG", "PASSPHRASE", "UI_TOKEN"]
    assert listed == [f"PERSISTING_{name}" for name in names]
    source = "".join(path.read_text() for path in (ROOT / "src/persisting/cli").rglob("*.py"))
    assert set(re.findall(r"PERSISTING_[A-Z_]+", source)) - {"PERSISTING_COMPLETE"} == set(listed)


def test_values_are_written_to_json_as_the_page_says():
    values = {
        "bytes": b"xy",
        "time": dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc),
        "date": dt.date(2026, 1, 2),
        "length": dt.timedelta(seconds=90),
        "decimal": decimal.Decimal("1.50"),
        "uuid": uuid.UUID(int=1),
        "nan": math.nan,
        "infinite": -math.inf,
    }
    assert json.loads(output.encoded(values)) == {
        "bytes": "eHk=",
        "time": "2026-01-02T00:00:00Z",
        "date": "2026-01-02",
        "length": "PT90S",
        "decimal": "1.50",
        "uuid": "00000000-0000-0000-0000-000000000001",
        "nan": None,
        "infinite": None,
    }


# Examples


def lines_in(text: str) -> list[str]:
    """The commands of a block: those after ``$`` in a console, else each line of a script."""
    lines = text.replace("\\\n", " ").splitlines()
    typed = [line[2:] for line in lines if line.startswith("$ ")] or lines
    return [line for line in typed if re.match(r"(echo .*\| )?persisting ", line)]


def split(line: str) -> tuple[list[str], bool]:
    """The words of ``persisting …``, and whether a shell has to do more than call it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>&;")
    lexer.whitespace_split = True
    found = list(lexer)
    start = found.index("persisting") + 1
    end = next((at for at, word in enumerate(found) if at >= start and word[0] in "|<>&;"), None)
    return found[start:end], start > 1 or end is not None


def everywhere() -> list[tuple[str, str]]:
    """Every command line of the documentation: page and line."""
    pages = [ROOT / "README.md", *english_pages(), *(DOCS / "reference").glob("cli.zh.md")]
    return [
        (str(page.relative_to(ROOT)), line)
        for page in pages
        for block in blocks(page)
        if block.language in ("bash", "console")
        for line in lines_in(block.text)
    ]


def understood(line: str, where: str) -> None:
    command, (rest, _) = cli, split(line)
    while isinstance(command, click.Group):
        name = rest.pop(0)
        assert name in command.commands, f"{where}: there is no command {name!r}"
        command = command.commands[name]
    try:
        command.make_context(command.name, rest, parent=click.Context(cli))
    except click.ClickException as exc:
        raise AssertionError(f"{where}: {line}: {exc.format_message()}") from exc


@pytest.fixture
def any_file(monkeypatch) -> None:
    """Command lines may name files that do not exist."""
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: value)


def test_every_command_line_of_the_documentation_is_understood(any_file):
    for page, line in everywhere():
        understood(line, page)


@pytest.mark.parametrize("page", both("guide/spark-jobs.md"), ids=["en", "zh"])
def test_page_of_spark_jobs_names_the_command_of_each_job_that_has_one(page: Path, any_file):
    told = {code(job): code(line) for job, line in rows(page.read_text("utf-8"), 2)}
    lines = {job: line for job, line in told.items() if line.startswith("persisting ")}
    for line in lines.values():
        understood(line, page.name)
    jobs = [name for name in COMMANDS if name.startswith("pipeline ")]
    assert {" ".join(split(line)[0][:2]) for line in lines.values()} == set(jobs)


async def _prepared(home: Path) -> None:
    events = [
        {
            "id": f"e{n}",
            "kind": "answer" if n % 2 else "question",
            "score": n / 10,
            "text": f"number {n} of the events",
            "meta": {"model": "a1" if n % 3 else "b2"},
        }
        for n in range(12)
    ]
    storage = str(home / "queue_storage")
    common: dict[str, Any] = {"storage_path": storage, "num_buckets": 1, "backend": "persisting"}
    async with await write_queue("events", **common) as writer:
        await writer.put(events[:8])
        await writer.tag("v1")
        await writer.put(events[8:])
        await writer.flush()
        async with await read_queue("events", storage_path=storage, group="trainers") as reader:
            await reader.get(limit=5)
            await reader.commit()
    async with await write_queue("rollouts", **common) as writer:
        texts = ("a lost update", "two writers, a lost update", "two writers and a lost update")
        await writer.put(
            [
                {"id": n, "text": text, "reward": float(n), "embedding": [n / 10, 1 - n / 10]}
                for n, text in enumerate(texts)
            ]
        )
    async with (
        await write_queue("tasks", **common) as writer,
        await read_queue("tasks", storage_path=storage, group="solvers", mode="work") as jobs,
    ):
        await writer.put([{"id": n} for n in range(3)])
        await writer.flush()
        first, *_ = await jobs.fetch(3, wait=True, timeout=30)
        await first.reject("timeout of the model")
    (home / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    table = pa.Table.from_pylist(events)
    (home / "exports").mkdir()
    for path in (home / "january.parquet", home / "exports" / "part.parquet"):
        pq.write_table(table, path)
    lance.write_dataset(table, str(home / "old.lance"))
    visits = gzip.compress(b"user,zip\nada,00501\nbob,10001\n")
    (home / "visits.csv.gz").write_bytes(visits)
    (home / ".config/fish/completions").mkdir(parents=True)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """What the examples of the reference work on."""
    home: Path = tmp_path_factory.mktemp("reference")
    asyncio.run(_prepared(home))
    return home


@pytest.fixture
def home(prepared: Path, tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A copy of it as the working folder, with ``persisting`` on the path."""
    place = tmp_path / "home"
    shutil.copytree(prepared, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("PERSISTING_STORAGE", "PERSISTING_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    log = logging.getLogger("persisting")
    before = log.handlers, log.propagate, log.level
    yield place
    log.handlers, log.propagate, log.level = before


def examples(name: str) -> list[str]:
    text = sections(PAGE)[name]
    return [
        line
        for part in re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)
        for line in lines_in(part)
    ]


ENDLESS = re.compile(r" -f | --follow|metrics serve|persisting serve|persisting ui")
HERE = [name for name in COMMANDS if examples(name) and not name.startswith(("pipeline", "demo"))]
SPARK = [name for name in COMMANDS if examples(name) and name.startswith("pipeline")]


def shell(line: str) -> None:
    if shutil.which("jq") is None:
        line = line.partition(" | jq")[0]
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def until_stopped(line: str) -> None:
    """Start it, wait for what it says first, and press Ctrl-C."""
    arguments, _ = split(line)
    if "metrics serve" in line or "persisting ui" in line:
        arguments += ["--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "persisting.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        rest, _ = interrupt(process)
    assert process.returncode == exit_codes.INTERRUPTED, first + rest
    assert rest.endswith("stopped\n")
    assert "error" not in first


def check(lines: list[str], capsys) -> None:
    for line in lines:
        arguments, needs_shell = split(line)
        if ENDLESS.search(line):
            until_stopped(line)
        elif needs_shell:
            shell(line)
        else:
            result = run(arguments)
            printed = capsys.readouterr()
            assert result == exit_codes.OK, f"{line}\n{printed.out}{printed.err}"


@pytest.mark.parametrize("name", HERE)
def test_the_examples_of_a_command_run(name: str, home: Path, capsys):
    check(examples(name), capsys)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SPARK)
def test_the_examples_of_a_spark_job_run(name: str, home: Path, capsys):
    check([f"{line} --master 'local[2]'" for line in examples(name)], capsys)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_demonstration_ends_and_its_folder_can_be_inspected(home: Path):
    demo, look = examples("demo")
    subprocess.run(["bash", "-c", demo], check=True, stdout=subprocess.DEVNULL)
    shell(look)


def test_every_command_has_an_example():
    for name, command in COMMANDS.items():
        assert isinstance(command, click.Group) or examples(name), name
