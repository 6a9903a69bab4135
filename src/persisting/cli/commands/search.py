"""``search`` and ``query``: find records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec

from persisting.cli import output, parameters, topics_access
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Position
from persisting.cli.record_text import brief, without_nulls
from persisting.errors import InvalidArgument


@click.command()
@parameters.topic
@click.option(
    "--text", "-t", help='Words to search for, or a query: +word -word "a phrase" begin* typo~.'
)
@click.option(
    "--match",
    type=click.Choice(["any", "all", "phrase", "query"]),
    default="query",
    show_default=True,
    help="How to match --text: any of its words, all of them, as a phrase, or as a query.",
)
@click.option(
    "--fuzziness",
    type=click.IntRange(0, 2),
    default=0,
    show_default=True,
    help="Number of typing errors that a word may have.",
)
@click.option(
    "--vector", "-v", metavar="JSON|@FILE", help="Vector to search for, or a file that contains it."
)
@click.option(
    "--like", type=Position(), help="Search for the vector of the record at bucket:offset."
)
@click.option("--column", "-f", help="Field to search; required if several fields qualify.")
@click.option(
    "-k", default=10, show_default=True, type=click.IntRange(1), help="Number of records to find."
)
@click.option(
    "--metric",
    type=click.Choice(["l2", "cosine", "dot"]),
    help="Distance between vectors.  [default: that of the index, else l2]",
)
@click.option("--exact", is_flag=True, help="Compare with every vector instead of using an index.")
@parameters.where
@parameters.columns
@parameters.nulls
@parameters.storage
@parameters.as_json
@prints("search", "persisting.cli.json_contract:Hit", lines=True)
def search(
    topic: str,
    text: str | None,
    match: str,
    fuzziness: int,
    vector: str | None,
    like: tuple[int, int] | None,
    column: str | None,
    k: int,
    metric: str | None,
    exact: bool,
    where: str | None,
    columns: list[str] | None,
    nulls: bool,
    storage: str,
    as_json: bool,
) -> None:
    """Find the records nearest to a vector, best matching some words, or both.

    \b
    Examples:
      persisting search notes --text "lost update"
      persisting search notes --text '+update -draft "lost update" trans*'
      persisting search rollouts --vector "[0.1, 0.9]" -k 5 --where "reward > 0"
      persisting search rollouts --like 0:12 --column embedding
    """
    if vector is not None and like is not None:
        raise click.UsageError("Pass either --vector or --like, not both.")
    if text is None and vector is None and like is None:
        raise click.UsageError("Pass what to search for: --text, --vector or --like.")

    topics_access.note_unflushed(topics_access.find_topic(topic, storage), reads_log=True)

    async def find() -> list[dict[str, Any]]:
        async with topics_access.reader(topic, storage) as reader:
            target = None if vector is None else _vector(vector)
            if like is not None:
                target = _vector_in((await reader.take([like]))[0], column)
            words: dict[str, Any] = {"match": match, "fuzziness": fuzziness} if text else {}
            try:
                return await reader.search(
                    target, text, column, k, where, columns, metric=metric, exact=exact, **words
                )
            except InvalidArgument as exc:
                raise InvalidArgument(str(exc).replace("column=…", "--column")) from exc

    for hit in topics_access.run(find()):
        _print(hit if nulls else without_nulls(hit), as_json)


@click.command()
@parameters.topic
@click.argument("condition", required=False)
@parameters.columns
@parameters.count("--limit", 100, "Maximum number of records to show.")
@parameters.bucket
@parameters.nulls
@parameters.storage
@parameters.as_json
@prints("query", "persisting.cli.json_contract:Row", lines=True)
def query(
    topic: str,
    condition: str | None,
    columns: list[str] | None,
    limit: int,
    bucket: int | None,
    nulls: bool,
    storage: str,
    as_json: bool,
) -> None:
    """Show the records that match an SQL condition, in order within each bucket.

    \b
    Examples:
      persisting query events "score > 0.5 AND kind = 'answer'"
      persisting query events "meta.model LIKE 'a%'" --columns id,score --json
    """
    topics_access.note_unflushed(topics_access.find_topic(topic, storage), reads_log=True)

    async def find() -> tuple[list[dict[str, Any]], int]:
        async with topics_access.reader(topic, storage, bucket) as reader:
            found = await reader.query(condition, columns, limit)
            return found, await reader.count(condition) if len(found) == limit else len(found)

    records, total = topics_access.run(find())
    for record in records:
        shown = record if nulls else without_nulls(record)
        if as_json:
            output.json_line({"record": shown})
        else:
            output.line(brief(shown))
    if total > len(records):
        output.say(
            f"note: {output.plural(total - len(records), 'more record')} matched; to show all, "
            f"pass --limit {total}"
        )


class Counted(msgspec.Struct):
    """How many records match a condition."""

    topic: str
    count: int


@click.command()
@parameters.topic
@click.argument("condition", required=False)
@parameters.bucket
@parameters.storage
@parameters.as_json
@prints("count", "persisting.cli.commands.search:Counted")
def count(
    topic: str, condition: str | None, bucket: int | None, storage: str, as_json: bool
) -> None:
    """Count the records of a topic, or those that match an SQL condition.

    \b
    Examples:
      persisting count events
      persisting count events "score > 0.5 AND kind = 'answer'"
    """
    source = topics_access.find_topic(topic, storage)
    topics_access.note_unflushed(source, reads_log=True)

    async def find() -> int:
        async with topics_access.reader(topic, storage, bucket) as reader:
            return await reader.count(condition)

    result = Counted(source.config.topic, topics_access.run(find()))
    output.show(result, as_json, lambda: output.line(str(result.count)))


def _print(hit: dict[str, Any], as_json: bool) -> None:
    bucket, offset = hit.pop("_bucket"), hit.pop("_offset")
    distance, score = hit.pop("_distance", None), hit.pop("_score", None)
    if as_json:
        output.json_line(
            {
                "bucket": bucket,
                "offset": offset,
                "distance": distance,
                "score": score,
                "record": hit,
            }
        )
        return
    position = f"{bucket}:{offset}"
    value = distance if score is None else score
    output.part(f"{position:>8}", "cyan")
    output.part(f"{value:>10.4f}", "green")
    output.line(brief(hit))


def _vector(given: str) -> list[float]:
    text = Path(given[1:]).read_text() if given.startswith("@") else given
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise click.UsageError(f"--vector is not a JSON list: {exc}") from exc
    if not isinstance(found, list) or not all(
        isinstance(item, (int, float)) and not isinstance(item, bool) for item in found
    ):
        raise click.UsageError("--vector must be a JSON list of numbers, as in [0.1, 0.9].")
    return found


def _vector_in(record: dict[str, Any], column: str | None) -> list[float]:
    """Return the vector of a record: in the given field, or its only list of numbers."""
    if column is not None:
        if not isinstance(record.get(column), list):
            raise click.UsageError(f"The record has no vector in {column!r}.")
        found: list[float] = record[column]
        return found
    fields = [
        name
        for name, value in record.items()
        if isinstance(value, list) and value and all(isinstance(item, float) for item in value)
    ]
    if len(fields) != 1:
        raise click.UsageError(
            f"Choose the vector field with --column; the record has: {', '.join(fields) or 'none'}."
        )
    chosen: list[float] = record[fields[0]]
    return chosen
