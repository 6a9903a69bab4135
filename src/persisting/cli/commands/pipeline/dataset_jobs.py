"""``pipeline profile`` and ``pipeline split``: jobs that prepare training data."""

from __future__ import annotations

import time
from typing import Any

import click

from persisting.cli import output, parameters, topics_access
from persisting.cli.commands.pipeline import job_group
from persisting.cli.commands.pipeline.job_group import JobOptions
from persisting.cli.commands.pipeline.job_result import JobResult, ProfileRow, print_result
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Names, Setting


@job_group.pipeline.command()
@parameters.topic
@parameters.columns
@job_group.job_options
@prints("pipeline profile", "persisting.cli.commands.pipeline.job_result:ProfileRow", many=True)
def profile(
    topic: str,
    columns: list[str] | None,
    job: JobOptions,
) -> None:
    """Show rows, nulls, ranges and text lengths of each field.

    \b
    Example:
      persisting pipeline profile events --columns score,text
    """
    source = topics_access.find_topic(topic, job.storage)
    topics_access.columns(source, columns)
    with job.session() as spark:
        from persisting.spark import jobs, read_topic

        rows = read_topic(spark, source.place, columns=columns, includeMetadata=True)
        plain = rows.drop("_offset", "_time")
        collected = [row.asDict(recursive=True) for row in jobs.profile(plain).collect()]
    profiles = [
        ProfileRow(row.pop("bucket"), row.pop("column"), row.pop("type"), row) for row in collected
    ]
    output.show(profiles, job.as_json, lambda: _print_profile(profiles))


def _print_profile(profiles: list[ProfileRow]) -> None:
    names = list(profiles[0].facts) if profiles else []
    output.table(
        ["#bucket", "field", "type", *(f"#{name}" for name in names)],
        [
            ["all" if row.bucket is None else row.bucket, row.column, row.type]
            + [row.facts[name] for name in names]
            for row in profiles
        ],
    )


@job_group.pipeline.command()
@parameters.topic
@click.option(
    "--key", "-k", type=Names(), required=True, help="Fields that decide the part of a record."
)
@click.option(
    "--tag", required=True, metavar="NAME", help="Tag to split; created now if it does not exist."
)
@click.option(
    "--share",
    type=Setting(),
    multiple=True,
    help="Name and share of a part, as in train=0.9; repeat it for each part.  "
    "[default: train=0.8, validation=0.1, test=0.1]",
)
@click.option(
    "--salt", default="", help="Text that is added to the hash; another salt gives another split."
)
@click.option(
    "--output",
    "-o",
    "output_folder",
    metavar="DIR",
    help="Write each part to DIR/<part>; without it, the parts are only counted.",
)
@job_group.mode("DIR/<part> exists")
@job_group.file_format("parquet")
@parameters.where
@parameters.columns
@job_group.job_options
@prints("pipeline split", "persisting.cli.commands.pipeline.job_result:JobResult")
def split(
    topic: str,
    key: list[str],
    tag: str,
    share: tuple[tuple[str, Any], ...],
    salt: str,
    output_folder: str | None,
    mode: str,
    kind: str | None,
    where: str | None,
    columns: list[str] | None,
    job: JobOptions,
) -> None:
    """Split a tagged topic into parts by a hash of keys; every run gives the same parts.

    \b
    Examples:
      persisting pipeline split curated --key id --tag v1
      persisting pipeline split curated --key id --tag v1 --share train=0.8 --share test=0.2
    """
    source, started = topics_access.find_topic(topic, job.storage), time.monotonic()
    topics_access.columns(source, [*(columns or []), *key])
    with job.session() as spark:
        from persisting.spark import jobs
        from persisting.spark.jobs.export_targets import part_targets
        from persisting.spark.jobs.split_job import SHARES

        shares = dict(share) or SHARES
        places = {} if output_folder is None else part_targets(output_folder, shares, kind, mode)
        parts = jobs.split_topic(
            spark,
            source.place,
            key=key,
            tag=tag,
            shares=shares,
            salt=salt,
            columns=columns,
            where=where,
        )
        counts = {
            name: jobs.export(part, places[name], format=kind, mode=mode)["rows"]
            if name in places
            else part.count()
            for name, part in parts.items()
        }
    seconds = time.monotonic() - started
    print_result(
        JobResult("split", source.config.topic, seconds, target=output_folder, parts=counts),
        job.as_json,
    )
