"""The group ``pipeline``, its shared options and its Spark session."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from persisting.cli import parameters, topics_access
from persisting.cli.command_group import CommandGroup
from persisting.cli.parameters import Setting
from persisting.errors import StorageError
from persisting.store_address import is_store_address

if TYPE_CHECKING:
    from persisting.cli.topics_access import TopicPlace
    from persisting.topic.topic_files import TopicFolder

_OPTIONS = {
    "bucket_column": "--bucket-column",
    "num_buckets": "--buckets",
    "name": "--name",
    "checkpoint": "--checkpoint",
}
_ARGUMENT = re.compile(rf"\b({'|'.join(_OPTIONS)})=(?!\w)")


@click.group(cls=CommandGroup)
def pipeline() -> None:
    """Run Spark jobs on whole topics, locally or on a cluster.

    persisting[spark] provides Java if the machine has none. Other processes may have the topics
    open, except for the jobs compact and index.

    \b
    Examples:
      persisting pipeline profile events
      persisting pipeline run events curated --where "score > 0" --select "id, lower(text) AS text"
      persisting pipeline split curated --key id --tag v1 --output training
    """


threshold = click.option(
    "--threshold",
    default=0.8,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Similarity from which two texts count as duplicates.",
)


def file_format(default: str) -> Any:
    """Return the option for the format of files; ``default`` describes the default."""
    return click.option(
        "--format",
        "kind",
        type=click.Choice(["parquet", "lance", "jsonl"]),
        help=f"Format of the files.  [default: {default}]",
    )


def mode(when: str) -> Any:
    """Return the option that says what to do with an existing target."""
    return click.option(
        "--mode",
        type=click.Choice(["error", "overwrite", "append"]),
        default="error",
        show_default=True,
        help=f"What to do if {when}.",
    )


@dataclass(frozen=True)
class JobOptions:
    """The options that all jobs share."""

    master: str
    conf: tuple[tuple[str, Any], ...]
    storage: str
    as_json: bool

    @contextmanager
    def session(self, topics: str | None = None) -> Iterator[Any]:
        """Start Spark for one job; its errors become one line, without Java stack traces.

        ``topics`` is the folder of a catalog.
        """
        from persisting.spark import session
        from persisting.spark.interrupts import preserved_interrupt_handler
        from persisting.spark.query_errors import SparkTrace, as_storage_errors, silence_logs

        # Fields of a topic may differ only in case.
        conf = {"spark.sql.caseSensitive": "true", **dict(self.conf)}
        with preserved_interrupt_handler():
            spark = session("persisting", master=self.master, conf=conf, topics=topics)
        if not topics_access.debugging():
            silence_logs(spark)
        try:
            with as_storage_errors():
                yield spark
        except StorageError as exc:
            if topics_access.debugging() and isinstance(exc.__cause__, SparkTrace):
                click.echo(exc.__cause__.trace, err=True)
            raise _naming_options(exc) from exc.__cause__
        finally:
            spark.stop()


def _naming_options(exc: StorageError) -> StorageError:
    """Return the error with the options of the command in place of the job's arguments."""
    from persisting.spark.query_errors import renamed

    text = _ARGUMENT.sub(lambda match: _OPTIONS[match[1]], str(exc))
    return exc if text == str(exc) else renamed(exc, text)


job_options = parameters.bundled(
    "job",
    JobOptions,
    click.option(
        "--master", default="local[*]", show_default=True, help="Address of the Spark master."
    ),
    click.option(
        "--conf", type=Setting(), multiple=True, help="Setting of Spark; may be repeated."
    ),
    parameters.storage,
    parameters.as_json,
)


def must_differ(source: TopicFolder, target: TopicPlace) -> None:
    """Raise if a job would write to the topic that it reads."""
    same = source.place == str(target)
    if isinstance(target.place, Path) and not is_store_address(source.place):
        same = source.folder.resolve() == target.place.resolve()
    if same:
        raise click.UsageError("Source and target are the same topic; choose another TARGET.")
