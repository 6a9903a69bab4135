"""Incremental copies of one topic into another: each run takes what is new since the last."""

from __future__ import annotations

import json
import os
import re
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
from persisting.spark.jobs.topic_lookup import open_topic, place_of, topic_place
from persisting.spark.query_errors import readable_errors
from persisting.spark.source import check_rows
from persisting.spark.source_options import option_text
from persisting.spark.stream_offsets import Place
from persisting.store_address import StoreAddress, is_store_address, parse
from persisting.topic.topic_files import TopicFolder, stored_config
from persisting.topic.topic_names import check_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

CHECKPOINTS = "checkpoints"
"""A folder of the target topic, so that removing the topic removes its checkpoints."""


class _CheckpointSource(msgspec.Struct):
    """The source whose offsets a checkpoint has; stored beside the checkpoint."""

    source: str
    """The folder of the source, relative to the checkpoint, or its address in an object store."""
    topic: str = ""
    """The id of the source topic; empty in checkpoints written before topics had one."""
    target: str = ""
    """The folder or the address of the target; empty if the checkpoint is in the target."""
    target_topic: str = ""
    """The id of the target topic; empty before it exists."""


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
    checkpoint: str | Path | None = None,
    quiet: bool | None = None,
) -> Summary:
    """Pass new rows of the topic ``source`` through ``transform`` into the topic ``target``.

    Both are given by their folders, or by their addresses in an object store. The target is created
    if it does not exist, with ``bucket_column`` and the other options of the sink. Each run takes
    the rows that exist when it starts and that no earlier run took, every row exactly once, even if
    a run is killed at any point and repeated. ``transform`` gets a streaming DataFrame; ``read``
    holds options of the source, such as ``columns``, ``filter`` or ``includeMetadata``.

    Progress is stored in ``<target>/checkpoints/<name>``; the default name is that of the source.
    Several sources, or several transforms of one source, can feed a target under different names.
    Runs with the same name wait for each other. A target in an object store needs ``checkpoint``
    instead: a folder for the progress of this source and target, which every later run must find
    again; Spark cannot write checkpoints to the store by itself. If the source has no records yet,
    there is nothing to do, which is not an error. A run whose rows the target cannot take raises
    before it creates anything. The summary has ``rows``, ``written``, ``batches``, ``seconds``
    and the ``lag`` by bucket: rows that arrived during the run. For ``quiet`` see
    :func:`persisting.spark.jobs.watch`.
    """
    stored, place = open_topic(source), topic_place(target)
    origin = place_of(stored)
    if origin == place:
        raise InvalidArgument(f"source and target are the same topic: {place}")
    progress = _progress_folder(place, name or origin.name, name, checkpoint)
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
    rows = _stream(spark, str(origin), read or {}, max_rows_per_batch)
    rows = rows if transform is None else transform(rows)
    # Before the checkpoint is created, so that a refused run leaves nothing behind.
    check_rows({"path": str(place), **options}, rows.schema)
    filesystem.current().make_folder(progress)
    with file_lock(progress / "lock"):
        noted = "" if checkpoint is None else str(place)
        _check_source(progress / "source.json", stored, origin, noted)
        query = (
            rows.writeStream.format("persisting")
            .options(**options)
            .option("checkpointLocation", str(progress / "spark"))
            .trigger(availableNow=True)
            .start(str(place))
        )
        summary = watch(query, quiet=quiet)
        _check_source(progress / "source.json", stored, origin, noted)  # the target may be new
        summary.lag = summary.lag or _lag(progress / "spark", stored)
        return summary


def _progress_folder(
    target: Path | StoreAddress, default: str, name: str | None, checkpoint: str | Path | None
) -> Path:
    """Return the folder for checkpoint, lock and source."""
    if checkpoint is None:
        if isinstance(target, StoreAddress):
            raise InvalidArgument(
                f"the target {target} is in an object store, where Spark cannot store its progress "
                "by itself: pass checkpoint=, a folder that later runs find again"
            )
        return target / CHECKPOINTS / check_name("checkpoint", default)
    if name is not None:
        raise InvalidArgument("name= and checkpoint= contradict each other: pass one of them")
    if isinstance(checkpoint, str) and _URL.match(checkpoint):
        raise InvalidArgument(
            f"checkpoint={checkpoint!r} must be a folder of the driver's machine, or one that is "
            "mounted there"
        )
    return Path(checkpoint).absolute()


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
    spark: SparkSession, origin: str, read: Mapping[str, Any], most: int | None
) -> DataFrame:
    reader = spark.readStream.format("persisting")
    for key, value in read.items():
        reader = reader.option(key, option_text(value))
    if most is not None:
        reader = reader.option("maxOffsetsPerTrigger", most)
    return reader.load(origin)


def _check_source(
    file: Path, stored: TopicFolder, origin: Path | StoreAddress, target: str
) -> None:
    """Raise if the checkpoint belongs to another source, in which its offsets mean nothing, or to
    another target, which has other rows.

    The path of a folder is relative, so that both topics can be moved together. ``target`` is empty
    for a checkpoint that is in its target.
    """
    source = str(origin)
    if isinstance(origin, Path):
        source = os.path.relpath(origin, file.parent)
    current = _CheckpointSource(source, stored.config.id, target, _id_of(target))
    fs = filesystem.current()
    try:
        known = json_files.decode(fs.read(file), _CheckpointSource)
    except FileNotFoundError:
        fs.write_file(file, msgspec.json.encode(current) + b"\n")
        return
    if known.source != current.source:
        place = known.source if is_store_address(known.source) else file.parent / known.source
        raise InvalidArgument(
            f"the checkpoint {file.parent} belongs to the source {place}, not to {origin}; use "
            f"another name=, or edit the path in {file} if the source was moved"
        )
    if known.target != current.target:
        raise InvalidArgument(
            f"the checkpoint {file.parent} belongs to the target "
            f"{known.target or 'topic that contains it'}, not to "
            f"{current.target or 'the topic that contains it'}; use another checkpoint="
        )
    if known.topic not in ("", current.topic):
        raise StorageError(
            f"the source {origin} was recreated since the checkpoint {file.parent} was "
            "written, and its offsets are those of the old topic; to read all of the new one, use "
            "another name=, or remove the checkpoint"
        )
    if known.target_topic not in ("", current.target_topic):
        raise StorageError(
            f"the target {target} was deleted or recreated since the checkpoint {file.parent} was "
            "written, and lacks the rows of earlier runs; to write all rows again, use another "
            "checkpoint="
        )
    if known != current:  # an id was unknown then
        fs.write_file(file, msgspec.json.encode(current) + b"\n")


def _id_of(target: str) -> str:
    """Return the id of the target topic, if it exists and its checkpoint is not in it."""
    if not target:
        return ""
    config = stored_config(parse(target) if is_store_address(target) else Path(target))
    return "" if config is None else config.id
