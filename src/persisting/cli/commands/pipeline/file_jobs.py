"""``pipeline export`` and ``pipeline ingest``: topics to files and back."""

from __future__ import annotations

import time
from typing import Any

import click

from persisting.cli import parameters, topics_access
from persisting.cli.commands.pipeline import job_group
from persisting.cli.commands.pipeline.job_group import JobOptions
from persisting.cli.commands.pipeline.job_result import JobResult, print_result
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Names


@job_group.pipeline.command()
@parameters.topic
@click.argument("path", type=click.Path())
@job_group.file_format("by the extension of PATH, else parquet")
@click.option("--partition-by", type=Names(), help="Write a folder for each value of these fields.")
@job_group.mode("PATH exists")
@parameters.tag("Export")
@parameters.where
@parameters.columns
@job_group.job_options
@prints("pipeline export", "persisting.cli.commands.pipeline.job_result:JobResult")
def export(
    topic: str,
    path: str,
    kind: str | None,
    partition_by: list[str] | None,
    mode: str,
    tag: str | None,
    where: str | None,
    columns: list[str] | None,
    job: JobOptions,
) -> None:
    """Write a topic to a folder of Parquet, Lance or JSON lines files.

    \b
    Examples:
      persisting pipeline export events training --partition-by label
      persisting pipeline export events v1.lance --tag v1 --columns id,text
    """
    source, started = topics_access.find_topic(topic, job.storage), time.monotonic()
    topics_access.columns(source, columns)
    with job.session() as spark:
        from persisting.spark import jobs, read_topic

        options: dict[str, Any] = {} if tag is None else {"tag": tag}
        rows = read_topic(spark, source.place, columns=columns, where=where, **options)
        done = jobs.export(rows, path, format=kind, partition_by=partition_by or (), mode=mode)
    seconds = time.monotonic() - started
    result = JobResult(
        "export",
        source.config.topic,
        seconds,
        rows=done["rows"],
        target=done["path"],
        files=done["files"],
        bytes=done["bytes"],
    )
    print_result(result, job.as_json)


@job_group.pipeline.command()
@parameters.topic
@click.argument("source", type=click.Path())
@job_group.file_format("by the extension")
@click.option(
    "--schema", metavar="DDL", help='Field types of JSON lines: "id STRING, score DOUBLE".'
)
@parameters.bucket_column
@parameters.buckets
@parameters.write_id
@job_group.job_options
@prints("pipeline ingest", "persisting.cli.commands.pipeline.job_result:JobResult")
def ingest(
    topic: str,
    source: str,
    kind: str | None,
    schema: str | None,
    bucket_column: str | None,
    buckets: int | None,
    write_id: str | None,
    job: JobOptions,
) -> None:
    """Store files, a folder or files that match a pattern in a topic.

    \b
    Examples:
      persisting pipeline ingest events "exports/*.parquet" --write-id load-1
      persisting pipeline ingest events old.lance
    """
    place, started = topics_access.place_of(topic, job.storage), time.monotonic()
    with job.session() as spark:
        from persisting.spark import jobs

        done = jobs.ingest(
            spark,
            source,
            str(place),
            format=kind,
            schema=schema,
            bucket_column=bucket_column,
            num_buckets=buckets,
            write_id=write_id,
        )
    seconds = time.monotonic() - started
    print_result(
        JobResult("ingest", place.name, seconds, rows=done["rows"], target=str(place)),
        job.as_json,
    )
