"""``pipeline run``: the incremental job."""

from __future__ import annotations

from typing import Any

import click

from persisting.cli import parameters, topics_access
from persisting.cli.commands.pipeline import job_group
from persisting.cli.commands.pipeline.job_group import JobOptions
from persisting.cli.commands.pipeline.job_result import JobResult, print_result
from persisting.cli.json_contract import prints


@job_group.pipeline.command("run")
@parameters.topic
@click.argument("target")
@parameters.where
@click.option(
    "--select", metavar="SQL", help='Fields to write, as Spark SQL: "id, lower(text) AS text".'
)
@click.option("--name", help="Name of the stored progress.  [default: name of the source]")
@click.option(
    "--checkpoint",
    metavar="DIR",
    help="Folder of the stored progress, which later runs find again; a TARGET in an object store "
    "needs one.  [default: in TARGET]",
)
@click.option(
    "--max-rows",
    type=click.IntRange(1),
    help="Maximum number of rows per batch.  [default: no limit]",
)
@parameters.bucket_column
@parameters.buckets
@job_group.job_options
@prints("pipeline run", "persisting.cli.commands.pipeline.job_result:JobResult")
def run(
    topic: str,
    target: str,
    where: str | None,
    select: str | None,
    name: str | None,
    checkpoint: str | None,
    max_rows: int | None,
    bucket_column: str | None,
    buckets: int | None,
    job: JobOptions,
) -> None:
    """Copy new records of a topic to another one, each record exactly once.

    Each run takes the records since the last run. A run that was killed at any point is continued
    by the next one. --where is pushed down to the storage; --select is Spark SQL.

    \b
    Example:
      persisting pipeline run events curated --where "score > 0" --select "id, score * 2 AS score"
    """
    source, place = (
        topics_access.find_topic(topic, job.storage),
        topics_access.place_of(target, job.storage),
    )
    job_group.must_differ(source, place)

    def transform(rows: Any) -> Any:
        return rows if select is None else rows.selectExpr(*_expressions(select))

    with job.session() as spark:
        from persisting.spark import jobs

        done = jobs.incremental(
            spark,
            source.place,
            str(place),
            transform,
            name=name,
            checkpoint=checkpoint,
            read={} if where is None else {"filter": where},
            max_rows_per_batch=max_rows,
            bucket_column=bucket_column,
            num_buckets=buckets,
            quiet=True if job.as_json else None,
        )
    result = JobResult(
        "run",
        source.config.topic,
        done.seconds,
        rows=done.rows,
        written=done.written,
        target=str(place),
        batches=done.batches,
        lag=done.lag,
    )
    print_result(result, job.as_json)


def _expressions(select: str) -> list[str]:
    """Split a list of expressions at its commas, except those in brackets or quotes."""
    parts, depth, quote, start, escaped = [], 0, "", 0, False
    for at, char in enumerate(select):
        if escaped or (char == "\\" and quote in ("'", '"')):
            escaped = not escaped
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(select[start:at])
            start = at + 1
    return [part.strip() for part in [*parts, select[start:]] if part.strip()]
