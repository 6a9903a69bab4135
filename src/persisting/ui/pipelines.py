"""The progress of Spark pipelines into a topic, from the checkpoints in its folder. Blocking."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from persisting.errors import StorageError
from persisting.spark.stream_offsets import decode
from persisting.topic.inspect import spans_of
from persisting.topic.store_files import StoreTopic
from persisting.topic.topic_files import TopicFolder

_FOLDER = "checkpoints"
_MAX = 100


class Pipeline(msgspec.Struct):
    """An incremental pipeline that writes into a topic."""

    name: str
    source: str = ""
    last_run: str | None = None
    """When its last batch was committed."""
    batches: int = 0
    rows: int = 0
    """Records of the source that it has taken."""
    lag: int = 0
    problem: str | None = None


def pipelines_into(target: TopicFolder) -> list[Pipeline]:
    """Return the pipelines that write into a topic; those into object stores are not found."""
    if isinstance(target, StoreTopic):
        return []
    place = target.folder / _FOLDER
    names = sorted(os.listdir(place)) if place.is_dir() else []
    return [_pipeline(target, place / name) for name in names[:_MAX] if (place / name).is_dir()]


def _pipeline(target: TopicFolder, checkpoint: Path) -> Pipeline:
    found = Pipeline(checkpoint.name)
    try:
        stored = json.loads((checkpoint / "source.json").read_bytes())
        origin = (checkpoint / str(stored["source"])).resolve()
        found.source = origin.name
        if origin.parent != target.folder.resolve().parent:
            found.problem = "its source is in another storage folder"
        commits = _numbered(checkpoint / "spark" / "commits")
        if not commits:
            return found
        number, newest = commits[-1]
        time = dt.datetime.fromtimestamp(newest.stat().st_mtime, dt.timezone.utc)
        found.batches, found.last_run = number + 1, time.isoformat()
        if found.problem is None:
            _count(found, origin, checkpoint / "spark" / "offsets" / str(number))
    except (OSError, ValueError, KeyError, TypeError, StorageError) as exc:
        found.problem = str(exc) or type(exc).__name__
    return found


def _count(found: Pipeline, origin: Path, offsets: Path) -> None:
    """Count what a pipeline has taken of its source, and what is left."""
    last: Any = json.loads(offsets.read_text().splitlines()[-1])
    places = decode(last)
    for bucket, span in spans_of(TopicFolder.open(origin)).items():
        reached = places[bucket].offset if bucket in places else span.start
        found.rows += reached
        found.lag += max(0, span.end - max(reached, span.start))


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return the files of a folder whose names are numbers, in their order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((int(name), folder / name) for name in names if name.isdecimal())
