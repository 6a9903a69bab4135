"""``pipeline dedupe`` and ``pipeline near-duplicates``."""

from __future__ import annotations

import datetime as dt
import time
from typing import Any

import click

from persisting.cli import output, parameters, topics_access
from persisting.cli.commands.pipeline import job_group
from persisting.cli.commands.pipeline.job_group import JobOptions
from persisting.cli.commands.pipeline.job_result import JobResult, NearPair, print_result
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Names
from persisting.cli.topics_access import TopicPlace
from persisting.errors import InvalidArgument


@job_group.pipeline.command()
@parameters.topic
@click.argument("target")
@click.option("--key", "-k", type=Names(), help="Fields that identify equal records.")
@click.option("--near", metavar="FIELD", help="Drop records whose text in this field is similar.")
@job_group.threshold
@click.option(
    "--keep",
    type=click.Choice(["first", "last"]),
    default="first",
    show_default=True,
    help="Which of several equal records to keep: first or last.",
)
@job_group.mode("the target has records")
@parameters.write_id
@job_group.job_options
@prints("pipeline dedupe", "persisting.cli.commands.pipeline.job_result:JobResult")
def dedupe(
    topic: str,
    target: str,
    key: list[str] | None,
    near: str | None,
    threshold: float,
    keep: str,
    mode: str,
    write_id: str | None,
    job: JobOptions,
) -> None:
    """Copy a topic to another one without duplicates.

    A target that already has records is an error unless --write-id is set: pass --mode to replace
    them or to append to them.

    \b
    Examples:
      persisting pipeline dedupe events events-once --key id --keep last
      persisting pipeline dedupe texts texts-once --near text --threshold 0.85
    """
    if key is None and near is None:
        raise click.UsageError("Pass what identifies duplicates: --key or --near.")
    source, place, started = (
        topics_access.find_topic(topic, job.storage),
        topics_access.place_of(target, job.storage),
        time.monotonic(),
    )
    job_group.must_differ(source, place)
    with job.session() as spark:
        from persisting.spark import jobs, read_topic

        if mode == "error" and write_id is None:
            _must_be_empty(spark, place)
        rows = read_topic(spark, source.place, includeMetadata=True)
        if key is not None:
            rows = jobs.deduplicate(rows, key, keep=keep)
        if near is not None:
            quiet = True if job.as_json else None
            rows = jobs.drop_near_duplicates(rows, near, threshold, keep=keep, quiet=quiet)
        plain = rows.drop("_bucket", "_offset", "_time")
        written = _save(plain, place, "overwrite" if mode == "overwrite" else "append", write_id)
    seconds = time.monotonic() - started
    result = JobResult("dedupe", source.config.topic, seconds, written=written, target=str(place))
    print_result(result, job.as_json)


def _save(rows: Any, place: TopicPlace, mode: str, write_id: str | None) -> int:
    from persisting.spark.jobs.row_count import counted

    options = {} if write_id is None else {"writeId": write_id}
    with counted(rows) as (observed, count):
        observed.write.format("persisting").mode(mode).options(**options).save(str(place))
    return count()


def _must_be_empty(spark: Any, target: TopicPlace) -> None:
    from persisting.spark import read_topic

    if target.exists and not read_topic(spark, str(target)).isEmpty():
        raise InvalidArgument(
            f"the topic {target.name!r} has records; pass --mode overwrite or append, or name the "
            "write with --write-id, so that it can be repeated"
        )


@job_group.pipeline.command("near-duplicates")
@parameters.topic
@click.option("--column", "-f", required=True, help="Field that contains the texts.")
@click.option(
    "--columns",
    "-c",
    type=Names(),
    metavar="A,B",
    help="Fields to show of both records, such as a key or the text.",
)
@job_group.threshold
@parameters.count("--limit", 100, "Maximum number of pairs to show.")
@job_group.job_options
@prints(
    "pipeline near-duplicates", "persisting.cli.commands.pipeline.job_result:NearPair", lines=True
)
def near_duplicates(
    topic: str,
    column: str,
    columns: list[str] | None,
    threshold: float,
    limit: int,
    job: JobOptions,
) -> None:
    """Show pairs of records with similar texts, the most similar first.

    \b
    Example:
      persisting pipeline near-duplicates texts --column text --columns id,text --threshold 0.9
    """
    source = topics_access.find_topic(topic, job.storage)
    shown = columns or []
    topics_access.columns(source, [column, *shown])
    with job.session() as spark:
        from persisting.spark import jobs, read_topic

        read = list(dict.fromkeys([column, *shown]))
        texts = read_topic(spark, source.place, columns=read, includeMetadata=True)
        quiet = True if job.as_json else None
        pairs = jobs.near_duplicates(texts, column, threshold, columns=shown, quiet=quiet)
        rows = pairs.orderBy("similarity", ascending=False).limit(limit).collect()
    for row in rows:
        pair = NearPair(_in_utc(row["first"]), _in_utc(row["second"]), row["similarity"])
        if job.as_json:
            output.json_line(pair)
        else:
            first, second = (f"{p['_bucket']}:{p['_offset']}" for p in (pair.first, pair.second))
            output.line(f"{first:>8}  {second:>8}  {pair.similarity:.3f}")
            for side in (pair.first, pair.second) if shown else ():
                output.line("          " + output.encoded({n: side[n] for n in shown}).decode())


def _in_utc(row: Any) -> dict[str, Any]:
    """Convert a row to a dict with timestamps in UTC; Spark returns them in local time."""
    return {
        name: value.astimezone(dt.timezone.utc) if isinstance(value, dt.datetime) else value
        for name, value in row.asDict().items()
    }
