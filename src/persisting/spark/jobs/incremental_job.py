"""One topic into another, step by step: each run takes what is new since the one before."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from persisting import fs as filesystem
from persisting import json_files
from persisting.errors import InvalidArgument, StorageError
from persisting.lock import file_lock
from persisting.spark.active_session import activate
from persisting.spark.jobs.sink_options import writer_options
from persisting.spark.jobs.stream_progress import Summary, watch
from persisting.spark.jobs.topic_lookup import folder_of, opened
from persisting.spark.source_options import plain
from persisting.topic.topic_files import TopicFolder
from persisting.topic.topic_names import check_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHECKPOINTS = "checkpoints"
"""A folder of the target topic: who removes the topic removes what is known of its making."""


class _Origin(msgspec.Struct):
    """Beside a checkpoint: what it counts the offsets of, seen from the target."""

    source: str
    topic: str = ""
    """The id of the source topic; empty in checkpoints written before topics had one."""


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
    """Bring what is new in the topic ``source`` through ``transform`` into the topic ``target``.

    Both are named by their folders; the target is made if it does not exist, with ``bucket_column``
    and the other options of the sink. Each run takes the rows that are there when it begins and
    were not taken before, every one exactly once: also if a run is killed at any point and
    repeated. ``transform`` is given a streaming DataFrame; ``read`` holds options of the source,
    such as ``columns``, ``filter`` or ``includeMetadata``.

    How far it has come is kept in ``<target>/checkpoints/<name>``, by default under the source's
    name. Several sources, or several transforms of one, can feed a target under names of their
    own. Runs of one name wait for each other. A source without any record yet is no error: there is
    nothing to do. The summary has ``rows``, ``written``, ``batches``,
    ``seconds`` and the ``lag`` by bucket: what came in meanwhile; see
    :func:`persisting.spark.jobs.watch` for ``quiet``.
    """
    stored, folder = opened(source), folder_of(target)
    origin = stored.folder
    if origin == folder:
        raise InvalidArgument(f"source and target are the same topic: {folder}")
    place = folder / CHECKPOINTS / check_name("checkpoint", name or origin.name)
    filesystem.current().make_folder(place)
    with file_lock(place / "lock"):
        stored.recover()
        _check_origin(place / "source.json", stored)
        if not stored.schema().names:
            return Summary()
        activate(spark)
        rows = _stream(spark, origin, read or {}, max_rows_per_batch)
        options = writer_options(
            bucket_column=bucket_column,
            num_buckets=num_buckets,
            compression=compression,
            vectors=vectors,
        )
        query = (
            (rows if transform is None else transform(rows))
            .writeStream.format("persisting")
            .options(**options)
            .option("checkpointLocation", str(place / "spark"))
            .trigger(availableNow=True)
            .start(str(folder))
        )
        return watch(query, quiet=quiet)


def _stream(
    spark: SparkSession, origin: Path, read: Mapping[str, Any], most: int | None
) -> DataFrame:
    reader = spark.readStream.format("persisting")
    for key, value in read.items():
        reader = reader.option(key, plain(value))
    if most is not None:
        reader = reader.option("maxOffsetsPerTrigger", most)
    return reader.load(str(origin))


def _check_origin(note: Path, stored: TopicFolder) -> None:
    """Offsets of one topic mean nothing in another: a checkpoint belongs to its source.

    The path is relative, so that topics may be moved together.
    """
    here = _Origin(os.path.relpath(stored.folder, note.parent), stored.config.id)
    fs = filesystem.current()
    try:
        known = json_files.decode(fs.read(note), _Origin)
    except FileNotFoundError:
        fs.write_file(note, msgspec.json.encode(here) + b"\n")
        return
    if known.source != here.source:
        raise InvalidArgument(
            f"the checkpoint {note.parent} is of the source {note.parent / known.source}, not of "
            f"{stored.folder}; use another name=, or write the new place to {note} if it was moved"
        )
    if not known.topic:
        fs.write_file(note, msgspec.json.encode(here) + b"\n")
    elif known.topic != here.topic:
        raise StorageError(
            f"the source {stored.folder} was made anew since the checkpoint {note.parent} was "
            "written, whose offsets are of the old one; use another name=, or remove the "
            "checkpoint, to take all of it"
        )
