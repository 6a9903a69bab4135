"""Work on Spark's executors, one task for each piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from persisting import errors
from persisting.errors import StorageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_T = TypeVar("_T")
_ANSWERS = pa.schema([("place", pa.int64()), ("answer", pa.string())])


def spread(spark: SparkSession, pieces: Sequence[_T], work: Callable[[_T], Any]) -> list[Any]:
    """What ``work`` makes of each piece, in their order; it must be plain enough for JSON.

    A :class:`StorageError` of a task is raised here as it was there, and the first one counts; a
    lost executor is Spark's to make good. ``work`` may therefore run more than once.
    """
    if not pieces:
        return []

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            places = batch.column(0).to_pylist()
            answers = [_answer(work, pieces[place]) for place in places]
            yield pa.record_batch([places, answers], schema=_ANSWERS)

    numbers = spark.range(0, len(pieces), 1, len(pieces))
    found = numbers.mapInArrow(run, "place long, answer string").collect()
    answers = [json.loads(row["answer"]) for row in sorted(found, key=lambda row: row["place"])]
    for one in answers:
        if "error" in one:
            raise _error(**one)
    return [one["result"] for one in answers]


def _answer(work: Callable[[_T], Any], piece: _T) -> str:
    try:
        return json.dumps({"result": work(piece)})
    except StorageError as exc:
        owner = getattr(exc, "owner", None)
        return json.dumps({"error": type(exc).__name__, "text": str(exc), "owner": owner})


def _error(error: str, text: str, owner: dict[str, Any] | None) -> StorageError:
    if error == errors.BucketLocked.__name__:
        return errors.BucketLocked(text, owner=owner)
    found: StorageError = getattr(errors, error, StorageError)(text)
    return found
