"""One topic into another, step by step: each run takes what is new since the one before."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from persisting import fs as filesystem
from persisting import notes
from persisting.errors import InvalidArgument, StorageError
from persisting.lock import file_lock
from persisting.spark.jobs.progress import Summary, watch
from persisting.spark.jobs.stored import folder_of, opened
from persisting.spark.jobs.writing import writer_options
from persisting.spark.options import plain
from persisting.spark.threads import activate
from persisting.topic import slices
from persisting.topic.folder import TopicFolder
from persisting.topic.names import check_name
from persisting.topic.slices import Slice

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHECKPOINTS = "checkpoints"
"""A folder of the target topic: who removes the topic removes what is known of its making."""


class _Row(msgspec.Struct):
    """A record of the source that was taken."""

    offset: int
    epoch: int
    time: int
    """When it arrived, in microseconds of Unix time."""


class _Origin(msgspec.Struct):
    """Beside a checkpoint: what it counts the offsets of, seen from the target."""

    source: str
    taken: dict[int, _Row] = {}
    """By bucket, the last one that a run took: a topic that is made anew has another one there."""


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
        note = place / "source.json"
        _check_origin(note, stored)
        if not stored.schema().names:
            return Summary()
        last = _last_rows(stored)
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
        done = watch(query, quiet=quiet)
        _keep(note, _Origin(_seen_from(note, origin), last))
        return done


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
    here = _seen_from(note, stored.folder)
    try:
        known = notes.decode(filesystem.current().read(note), _Origin)
    except FileNotFoundError:
        _keep(note, _Origin(here))
        return
    if known.source != here:
        raise InvalidArgument(
            f"the checkpoint {note.parent} is of the source {note.parent / known.source}, not of "
            f"{stored.folder}; use another name=, or write the new place to {note} if it was moved"
        )
    for bucket, row in known.taken.items():
        if not _is_there(stored, bucket, row):
            raise StorageError(
                f"the source {stored.folder} was made anew since the checkpoint {note.parent} was "
                "written, whose offsets are of the old one; use another name=, or remove the "
                "checkpoint, to take all of it"
            )


def _seen_from(note: Path, origin: Path) -> str:
    return os.path.relpath(origin, note.parent)


def _keep(note: Path, origin: _Origin) -> None:
    filesystem.current().write_file(note, msgspec.json.encode(origin) + b"\n")


def _last_rows(stored: TopicFolder) -> dict[int, _Row]:
    """By bucket, the last record that is there; a run takes all up to it."""
    found = {}
    for bucket in stored.buckets:
        offset, epoch = stored.view(bucket).end - 1, len(stored.table(bucket).restores)
        time = _time(stored, bucket, offset, epoch)
        if time is not None:
            found[bucket] = _Row(offset, epoch, time)
    return found


def _is_there(stored: TopicFolder, bucket: int, row: _Row) -> bool:
    """Whether a record is the one that was taken, as far as can be known."""
    if bucket not in stored.buckets:
        return False
    if len(stored.table(bucket).restores) != row.epoch:
        return True  # the stream sees to it
    if row.offset >= stored.view(bucket).end:
        return False
    return _time(stored, bucket, row.offset, row.epoch) in (None, row.time)


def _time(stored: TopicFolder, bucket: int, offset: int, epoch: int) -> int | None:
    """When the record at an offset arrived; None if it is not there, or no longer."""
    if not stored.view(bucket).start <= offset < stored.view(bucket).end:
        return None
    part = Slice(str(stored.folder), bucket, offset, offset + 1, epoch)
    for batch in slices.read(part, [], metadata=True):
        for time in batch.column(batch.num_columns - 1).cast(pa.int64()).to_pylist():
            return int(time)
    return None
