"""``index``: creates, lists and drops the indexes of a topic."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from persisting.cli import output, parameters, topics_access
from persisting.cli.command_group import CommandGroup
from persisting.cli.json_contract import prints


class Index(msgspec.Struct):
    """An index of a field, over all buckets."""

    column: str
    kind: str
    metric: str | None
    rows: int
    """Rows that the index covers."""
    behind: int
    """Rows that it does not cover yet; a search reads them without it."""


class Dropped(msgspec.Struct):
    """How many indexes were dropped."""

    topic: str
    column: str
    dropped: int


@click.group(cls=CommandGroup)
def index() -> None:
    """Create, list and drop the indexes that make searches and lookups fast.

    \b
    Example:
      persisting index create notes text
    """


@index.command()
@parameters.topic
@click.argument("column")
@click.option(
    "--kind",
    help="Kind of index: vector, text, scalar, ivf_flat, ivf_rq, ivf_hnsw_sq, btree or bitmap."
    "  [default: by the type of the field]",
)
@parameters.metric
@parameters.storage
@parameters.as_json
@prints("index create", "persisting.cli.commands.index:Index")
def create(
    topic: str, column: str, kind: str | None, metric: str, storage: str, as_json: bool
) -> None:
    """Index a field in every bucket; an existing index of the same kind is rebuilt.

    The owner of the topic keeps the index up to date. Another process of the same user may have the
    topic open. For large topics see 'persisting pipeline index', which distributes the work.

    \b
    Examples:
      persisting index create notes text
      persisting index create rollouts embedding --metric cosine
    """

    async def work() -> dict[str, Any]:
        async with topics_access.reader(topic, storage) as reader:
            return await reader.create_index(column, kind, metric=metric)

    result = _index(topics_access.run(work()))
    output.show(result, as_json, lambda: _print_indexes([result]))


@index.command("list")
@parameters.topic
@parameters.storage
@parameters.as_json
@prints("index list", "persisting.cli.commands.index:Index", many=True)
def list_(topic: str, storage: str, as_json: bool) -> None:
    """List the indexes with the rows that they cover, and the rows that they do not cover yet.

    \b
    Example:
      persisting index list notes
    """

    async def work() -> list[dict[str, Any]]:
        async with topics_access.reader(topic, storage) as reader:
            return await reader.indexes()

    found = [_index(entry) for entry in topics_access.run(work())]
    output.show(found, as_json, lambda: _print_indexes(found))


@index.command()
@parameters.topic
@click.argument("column")
@click.option("--kind", help="Drop only the index of this kind.")
@parameters.storage
@parameters.as_json
@prints("index drop", "persisting.cli.commands.index:Dropped")
def drop(topic: str, column: str, kind: str | None, storage: str, as_json: bool) -> None:
    """Drop the indexes of a field; searches still work, but read every row.

    \b
    Example:
      persisting index drop notes text
    """

    async def work() -> Dropped:
        async with topics_access.reader(topic, storage) as reader:
            return Dropped(reader.topic, column, await reader.drop_index(column, kind))

    result = topics_access.run(work())
    output.show(
        result,
        as_json,
        lambda: output.line(f"{output.plural(result.dropped, 'index', 'indexes')} dropped"),
    )


def _index(entry: dict[str, Any]) -> Index:
    metric = entry["metric"] if entry.get("family") == "vector" else None
    return Index(entry["column"], entry["kind"], metric, entry["rows"], entry["behind"])


def _print_indexes(indexes: list[Index]) -> None:
    if not indexes:
        output.say("no indexes")
        return
    output.table(
        ["field", "kind", "metric", "#rows", "#behind"],
        [[entry.column, entry.kind, entry.metric, entry.rows, entry.behind] for entry in indexes],
    )
