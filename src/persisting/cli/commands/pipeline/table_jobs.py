"""``pipeline compact`` and ``pipeline index``: jobs that change the tables of a topic."""

from __future__ import annotations

import time

import click

from persisting.cli import parameters, topics_access
from persisting.cli.commands.pipeline import job_group
from persisting.cli.commands.pipeline.job_group import JobOptions
from persisting.cli.commands.pipeline.job_result import JobResult, print_result
from persisting.cli.json_contract import prints


@job_group.pipeline.command()
@parameters.topic
@job_group.job_options
@prints("pipeline compact", "persisting.cli.commands.pipeline.job_result:JobResult")
def compact(topic: str, job: JobOptions) -> None:
    """Merge small fragments into larger ones, distributed over the cluster.

    \b
    Example:
      persisting pipeline compact events --master spark://host:7077
    """
    source = topics_access.find_topic(topic, job.storage)
    with job.session() as spark:
        from persisting.spark import jobs

        done = jobs.compact(spark, source.place)
    print_result(
        JobResult(
            "compact",
            source.config.topic,
            done["seconds"],
            rows=done["rows"],
            fragments_before=done["fragments_before"],
            fragments_after=done["fragments_after"],
        ),
        job.as_json,
    )


@job_group.pipeline.command()
@parameters.topic
@click.option("--column", "-f", required=True, help="Field to index.")
@click.option(
    "--kind", help="Kind of index: vector, text or scalar.  [default: by the type of the field]"
)
@parameters.metric
@job_group.job_options
@prints("pipeline index", "persisting.cli.commands.pipeline.job_result:JobResult")
def index(
    topic: str,
    column: str,
    kind: str | None,
    metric: str,
    job: JobOptions,
) -> None:
    """Build an index of a field, with one task per bucket.

    \b
    Example:
      persisting pipeline index rollouts --column embedding --metric cosine
    """
    source, started = topics_access.find_topic(topic, job.storage), time.monotonic()
    with job.session() as spark:
        from persisting.spark import jobs

        done = jobs.build_index(spark, source.place, column=column, kind=kind, metric=metric)
    seconds = time.monotonic() - started
    print_result(JobResult("index", source.config.topic, seconds, rows=done["rows"]), job.as_json)
