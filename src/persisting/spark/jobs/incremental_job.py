"""Incremental copies of one topic into another: each run takes what is new since the last."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from persisting import fs as filesystem
from persisting import json_files
from persisting.errors import InvalidArgument, StorageError
from persisting.lock import file_lock
from persisting.spark import stream_offsets
from persisting.spark.active_session import activate
from persisting.spark.jobs.sink_options import names_arguments, writer_options
from persisting.spark.jobs.stream_progress import Summary, watch
from persisting.spark.jobs.topic_lookup import open_topic, topic_folder
from persisting.spark.query_errors import readable_errors
from persisting.spark.source import check_rows
from persisting.spark.source_options import option_text
from persisting.spark.stream_offsets import Place
from persisting.topic.topic_files import TopicFolder
from persisting.topic.topic_names import check_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHECKPOINTS = "checkpoints"
"""A folder of the target topic, so that removing the topic removes its checkpoints."""


class _CheckpointSource(msgspec.Struct):
    """The source whose offsets a checkpoint has; stored beside the checkpoint."""

    source: str
    """The folder of the source, relative to the checkpoint."""
    topic: str = ""
    """The id of the source topic; empty in checkpoints written before topics had one."""


@names_arguments
@readable_errors
def incremental(
    spark: SparkSession,
    source: str | Path,
    target: str | Path,
    transform: Callable[[DataFrame], DataFrame] | None = None,
    *,
    name: str | None = None,
    read: Mapping[str, Any] | None = None,
    max_rows_per_batch: int | None = None,
    bucket_column: str | None = None,
    num_buckets: int | None = None,
    compression: str | None = None,
    vectors: Mapping[str, int] | None = None,
    quiet: bool | None = None,
) -> Summary:
    """Pass new rows of the topic ``source`` through ``transform`` into the topic ``target``.

    Both are given by their folders. The target is created if it does not exist, with
    ``bucket_column`` and the other options of the sink. Each run takes the rows that exist when it
    starts and that no earlier run took, every row exactly once, even if a run is killed at any
    point and repeated. ``transform`` gets a streaming DataFrame; ``read`` holds options of the
    source, such as ``columns``, ``filter`` or ``includeMetadata``.

    Progress is stored in ``<target>/checkpoints/<name>``; the default name is that of the source.
    Several sources, or several transforms of one source, can feed a target under different names.
    Runs with the same name wait for each other. If the source has no records yet, there is nothing
    to do, which is not an error. A run whose rows the target cannot take raises before it creates
    anything. The summary has ``rows``, ``written``, ``batches``, ``seconds``
    and the ``lag`` by bucket: rows that arrived during the run. For ``quiet`` see
    :func:`persisting.spark.jobs.watch`.
    """
    stored, folder = open_topic(source), topic_folder(target)
    origin = stored.folder
    if origin == folder:
        raise InvalidArgument(f"source and target are the same topic: {folder}")
    checkpoint = folder / CHECKPOINTS / check_name("checkpoint", name or origin.name)
    stored.recover()
    if not stored.schema().names:
        return Summary(lag=dict.fromkeys(map(str, stored.buckets), 0))
    activate(spark)
    options = writer_options(
        bucket_column=bucket_column,
        num_buckets=num_buckets,
        compression=compression,
        vectors=vectors,
    )
    rows = _stream(spark, origin, read or {}, max_rows_per_batch)
    rows = rows if transform is None else transform(rows)
    # Before the checkpoint is created, so that a refused run leaves nothing behind.
    check_rows({"path": str(folder), **options}, rows.schema)
    filesystem.current().make_folder(checkpoint)
    with file_lock(checkpoint / "lock"):
        _check_source(checkpoint / "source.json", stored)
        query = (
            rows.writeStream.format("persisting")
            .options(**options)
            .option("checkpointLocation", str(checkpoint / "spark"))
            .trigger(availableNow=True)
            .start(str(folder))
        )
        summary = watch(query, quiet=quiet)
        summary.lag = summary.lag or _lag(checkpoint / "spark", stored)
        return summary


def _lag(checkpoint: Path, stored: TopicFolder) -> dict[str, int]:
    """Return by bucket the rows that arrived since the last run; Spark reports none if a run had
    nothing to do."""
    batches = [int(path.name) for path in (checkpoint / "offsets").glob("[0-9]*")]
    last = (checkpoint / "offsets" / str(max(batches))).read_text() if batches else "{}"
    taken = stream_offsets.decode(json.loads(last.splitlines()[-1]))
    return {
        str(bucket): max(0, stored.view(bucket).end - taken.get(bucket, Place(0)).offset)
        for bucket in stored.buckets
    }


def _stream(
    spark: SparkSession, origin: Path, read: Mapping[str, Any], most: int | None
) -> DataFrame:
    reader = spark.readStream.format("persisting")
    for key, value in read.items():
        reader = reader.option(key, option_text(value))
    if most is not None:
        reader = reader.option("maxOffsetsPerTrigger", most)
    return reader.load(str(origin))


def _check_source(file: Path, stored: TopicFolder) -> None:
    """Raise if the checkpoint belongs to another source: its offsets mean nothing in this one.

    The stored path is relative, so that both topics can be moved together.
    """
    current = _CheckpointSource(os.path.relpath(stored.folder, file.parent), stored.config.id)
    fs = filesystem.current()
    try:
        known = json_files.decode(fs.read(file), _CheckpointSource)
    except FileNotFoundError:
        fs.write_file(file, msgspec.json.encode(current) + b"\n")
        return
    if known.source != current.source:
        raise InvalidArgument(
            f"the checkpoint {file.parent} belongs to the source {file.parent / known.source}, not "
            f"to {stored.folder}; use another name=, or edit the path in {file} if the source was "
            "moved"
        )
    if not known.topic:
        fs.write_file(file, msgspec.json.encode(current) + b"\n")
    elif known.topic != current.topic:
        raise StorageError(
            f"the source {stored.folder} was recreated since the checkpoint {file.parent} was "
            "written, and its offsets are those of the old topic; to read all of the new one, use "
            "another name=, or remove the checkpoint"
        )
