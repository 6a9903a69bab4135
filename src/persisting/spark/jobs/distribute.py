"""Runs a function on Spark's executors, one task for each piece of work."""

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


def run_on_executors(
    spark: SparkSession, pieces: Sequence[_T], work: Callable[[_T], Any]
) -> list[Any]:
    """Call ``work`` for each piece; return the results, which must fit into JSON, in order.

    If tasks raise :class:`StorageError`, the first of these is raised here. Spark repeats the tasks
    of a lost executor, so ``work`` may run more than once for a piece.
    """
    if not pieces:
        return []

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            places = batch.column(0).to_pylist()
            answers = [_answer(work, pieces[place]) for place in places]
            yield pa.record_batch([places, answers], schema=_ANSWERS)

    numbers = spark.range(0, len(pieces), 1, len(pieces))
    rows = numbers.mapInArrow(run, "place long, answer string").collect()
    answers = [json.loads(row["answer"]) for row in sorted(rows, key=lambda row: row["place"])]
    for answer in answers:
        if "error" in answer:
            raise _error(**answer)
    return [answer["result"] for answer in answers]


def _answer(work: Callable[[_T], Any], piece: _T) -> str:
    try:
        return json.dumps({"result": work(piece)})
    except StorageError as exc:
        owner = getattr(exc, "owner", None)
        return json.dumps({"error": type(exc).__name__, "text": str(exc), "owner": owner})


def _error(error: str, text: str, owner: dict[str, Any] | None) -> StorageError:
    if error == errors.BucketLocked.__name__:
        return errors.BucketLocked(text, owner=owner)
    exception: StorageError = getattr(errors, error, StorageError)(text)
    return exception
