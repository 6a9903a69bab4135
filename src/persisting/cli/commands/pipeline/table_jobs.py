"""``pipeline compact`` and ``pipeline index``: jobs that change the tables of a topic."""

from __future__ import annotations

import time
from typing import Any

import click

from persisting.cli import parameters, topics_access
from persisting.cli.commands.pipeline.job_group import pipeline, spark_options, spark_session
from persisting.cli.commands.pipeline.job_result import JobResult, print_result
from persisting.cli.json_contract import prints


@pipeline.command()
@parameters.topic
@spark_options
@prints("pipeline compact", "persisting.cli.commands.pipeline.job_result:JobResult")
def compact(topic: str, master: str, conf: Any, storage: str, as_json: bool) -> None:
    """Merge small fragments into larger ones, distributed over the cluster.

    \b
    Example:
      persisting pipeline compact events --master spark://host:7077
    """
    source = topics_access.find_topic(topic, storage)
    with spark_session(master, conf) as spark:
        from persisting.spark import jobs

        done = jobs.compact(spark, source.folder)
    print_result(
        JobResult(
            "compact",
            source.config.topic,
            done["seconds"],
            rows=done["rows"],
            fragments_before=done["fragments_before"],
            fragments_after=done["fragments_after"],
        ),
        as_json,
    )


@pipeline.command()
@parameters.topic
@click.option("--column", "-f", required=True, help="Field to index.")
@click.option(
    "--kind", help="Kind of index: vector, text or scalar.  [default: by the type of the field]"
)
@click.option(
    "--metric",
    type=click.Choice(["l2", "cosine", "dot"]),
    default="l2",
    show_default=True,
    help="Distance between vectors.",
)
@spark_options
@prints("pipeline index", "persisting.cli.commands.pipeline.job_result:JobResult")
def index(
    topic: str,
    column: str,
    kind: str | None,
    metric: str,
    master: str,
    conf: Any,
    storage: str,
    as_json: bool,
) -> None:
    """Build an index of a field, with one task per bucket.

    \b
    Example:
      persisting pipeline index rollouts --column embedding --metric cosine
    """
    source, started = topics_access.find_topic(topic, storage), time.monotonic()
    with spark_session(master, conf) as spark:
        from persisting.spark import jobs

        done = jobs.build_index(spark, source.folder, column=column, kind=kind, metric=metric)
    seconds = time.monotonic() - started
    print_result(JobResult("index", source.config.topic, seconds, rows=done["rows"]), as_json)
