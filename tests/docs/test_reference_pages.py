"""The reference pages list exactly the API, options, metrics, errors and formats of the code."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import ROOT, blocks, both, code, option_defaults, table_with, tables

from persisting import data, errors, metrics, queue
from persisting.cli import exit_codes, metrics_exporter
from persisting.errors import StorageError, TableError, WALError
from persisting.options import BucketOptions, PersistingOptions
from persisting.spark import jobs
from persisting.table import layout
from persisting.topic import backup, spec
from persisting.wal import frame


def pages(name: str) -> Any:
    return pytest.mark.parametrize("page", both(name), ids=["en", "zh"])


# API


def documented_names(page: Path) -> list[str]:
    return re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)


@pages("reference/api.md")
def test_api_page_lists_exactly_the_public_names(page: Path):
    problems = {name for name in queue.__all__ if inspect.isclass(getattr(queue, name))}
    raised = {name for name in problems if issubclass(getattr(queue, name), StorageError)}
    expected = {f"persisting.queue.{name}" for name in set(queue.__all__) - raised}
    expected |= {
        f"persisting.spark.{name}" for name in ("session", "read_topic", "install_pruning")
    }
    expected |= {f"persisting.spark.jobs.{name}" for name in jobs.__all__}
    expected |= {"persisting.cluster.host.serve", "persisting.cluster.host.Host"}
    nodes = ("StorageNode", "NodeOptions", "NodeHealth")
    expected |= {f"persisting.cluster.node.{name}" for name in nodes}
    expected |= {"persisting.metrics.serve"}
    expected |= {f"persisting.data.{name}" for name in data.__all__}
    assert set(documented_names(page)) == expected


@pages("reference/api.md")
def test_api_names_and_listed_members_have_docstrings(page: Path):
    text = page.read_text("utf-8")
    for name in documented_names(page):
        module, _, last = name.rpartition(".")
        thing = getattr(import_module(module), last)
        assert inspect.getdoc(thing), name
        options = re.search(rf"^::: {re.escape(name)}\n    options:\n((?:      .*\n)+)", text, re.M)
        listed = re.search(r"members: \[(.*)\]", options[1]) if options else None
        for member in listed[1].split(", ") if listed else ():
            assert inspect.getdoc(getattr(thing, member)), f"{name}.{member}"


# Options


@pages("reference/options.md")
def test_options_page_lists_every_option_with_its_defaults(page: Path):
    rows = {code(row[0]): row for row in table_with(page, "bucket_id", "enable_wal")}
    lance, persisting = option_defaults(BucketOptions), option_defaults(PersistingOptions)
    assert list(rows) == list(persisting)
    for name, row in rows.items():
        for column, known in ((2, lance), (3, persisting)):
            said = code(row[column])
            if name == "flush_threshold" and column == 3:
                assert said == "max(1000, batch_size)"
            elif name not in known:
                assert row[column] in ("not taken", "不接受"), name
            elif said:
                assert eval(said) == known[name], name  # noqa: S307
            else:
                assert row[column] in ("required", "必需"), name
        assert row[4], name


# Metrics


def kind_of(family: Any) -> str:
    return type(family).__name__.lower()


@pages("reference/metrics.md")
def test_metrics_page_lists_every_metric_with_its_type_and_labels(page: Path):
    expected = {}
    for family in vars(metrics._families()).values():
        name = family._name + ("_total" if kind_of(family) == "counter" else "")
        expected[name] = (kind_of(family), list(family._labelnames))
    group = metrics._group_lag()
    expected[group._name] = (kind_of(group), list(group._labelnames))
    for outside in metrics_exporter._families().values():
        labels = (outside.type, list(outside._labelnames))
        name = outside.name + ("_total" if outside.type == "counter" else "")
        assert expected.setdefault(name, labels) == labels
    listed = {
        code(row[0]): (row[1], re.findall(r"`(\w+)`", row[2]))
        for table in tables(page)
        for row in table[1:]
    }
    assert listed == expected


# Errors


def tree() -> dict[str, type[StorageError]]:
    return {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, StorageError)
    }


@pages("reference/errors.md")
def test_errors_page_lists_every_error_with_its_exit_code(page: Path):
    drawing = next(block.text for block in blocks(page) if block.language == "text")
    drawn = re.findall(r"^[├└─ ]*(\w+)(.*)$", drawing, re.MULTILINE)
    assert {name for name, _ in drawn} == set(tree())
    for name, remark in drawn:
        assert ("ValueError" in remark) == issubclass(tree()[name], ValueError)
    rows = {code(row[0]): row for row in table_with(page, "StorageError", "BucketLocked")}
    assert set(rows) == set(tree()) <= set(queue.__all__)
    for name, kind in tree().items():
        assert rows[name][3] == f"`{exit_codes.code_of(kind())}`", name


def test_errors_docstring_draws_the_same_tree():
    named = set(re.findall(r"(?:├── |└── |^    )([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE))
    assert named == set(tree())


# Upgrade


@pages("guide/upgrade.md")
def test_upgrade_page_states_the_format_numbers_of_the_code(page: Path):
    rows = tables(page)[0][1:]
    numbers = [spec.FORMAT, layout.FORMAT, frame.FORMAT_VERSION, backup.FORMAT]
    assert [code(row[2]) for row in rows] == [str(number) for number in numbers]
    kinds = [StorageError, TableError, WALError, StorageError]
    assert [code(row[3]) for row in rows] == [kind.__name__ for kind in kinds]
    assert spec.FILE in rows[0][1]
    assert layout.FORMAT_KEY in rows[1][1]
    assert spec.BACKUP_FILE in rows[3][1]


@pages("guide/upgrade.md")
def test_upgrade_page_names_the_required_lance_release(page: Path):
    required = re.search(r'"pylance==([\d.]+)\.\*"', (ROOT / "pyproject.toml").read_text())
    assert required is not None
    assert required[1] in page.read_text("utf-8")


# Declarative pipelines


@pages("guide/declarative-pipelines.md")
def test_pipelines_page_quotes_the_example(page: Path):
    example = ROOT / "examples/spark_pipeline"
    sources = "".join(path.read_text() for path in sorted(example.rglob("*.py")))
    text = (example / "spark-pipeline.yml").read_text()
    shown = [block for block in blocks(page) if block.language in ("py", "yaml")]
    assert len(shown) == 4
    for block in shown:
        assert block.text in (sources if block.language == "py" else text), f"{page}:{block.line}"
