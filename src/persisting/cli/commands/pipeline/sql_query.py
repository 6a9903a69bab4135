"""``pipeline sql``: a query on topics by their names."""

from __future__ import annotations

import datetime as dt
import time
from typing import Any

import click

from persisting.cli import output, parameters, topics_access
from persisting.cli.commands.pipeline import job_group
from persisting.cli.commands.pipeline.job_group import JobOptions
from persisting.cli.commands.pipeline.job_result import JobResult, SqlRow, print_result
from persisting.cli.json_contract import prints
from persisting.cli.topics_access import TopicPlace
from persisting.errors import InvalidArgument


@job_group.pipeline.command("sql")
@click.argument("statement")
@click.option("--to", "target", metavar="TOPIC", help="New topic to write the rows to.")
@parameters.bucket_column
@parameters.buckets
@parameters.count("--limit", 100, "Maximum number of rows to show.")
@job_group.job_options
@prints("pipeline sql", "persisting.cli.commands.pipeline.job_result:SqlRow", lines=True)
def sql(
    statement: str,
    target: str | None,
    bucket_column: str | None,
    buckets: int | None,
    limit: int,
    job: JobOptions,
) -> None:
    """Run Spark SQL on topics, which are tables of the catalog "persisting".

    \b
    Examples:
      persisting pipeline sql "SELECT kind, count(*) FROM persisting.events GROUP BY kind"
      persisting pipeline sql "SELECT id, text FROM persisting.events WHERE score > 0" --to good
    """
    place = None if target is None else topics_access.place_of(target, job.storage)
    if place is not None and place.exists:
        raise InvalidArgument(f"the topic {target!r} exists; name a new one with --to")
    started = time.monotonic()
    with job.session(topics=job.storage) as spark:
        rows = spark.sql(statement)
        if place is None:
            found = rows.limit(limit).collect()
            names = rows.columns
        else:
            written = _write(rows, place, bucket_column, buckets)
    if place is not None:
        seconds = time.monotonic() - started
        if job.as_json:
            output.json_line(SqlRow({"topic": target, "written": written, "seconds": seconds}))
        else:
            print_result(JobResult("sql", str(target), seconds, written=written), False)
    elif job.as_json:
        for row in found:
            output.json_line(SqlRow(row.asDict(recursive=True)))
    elif names:
        output.table(names, [[_cell(value) for value in row] for row in found])


def _write(rows: Any, place: TopicPlace, bucket_column: str | None, buckets: int | None) -> int:
    from persisting.spark.jobs.row_count import counted
    from persisting.spark.jobs.sink_options import writer_options

    options = writer_options(bucket_column=bucket_column, num_buckets=buckets)
    with counted(rows) as (observed, count):
        observed.write.format("persisting").mode("append").options(**options).save(str(place))
    return count()


def _cell(value: Any) -> Any:
    return value.isoformat(" ") if isinstance(value, dt.datetime) else value
