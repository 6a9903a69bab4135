"""A topic, or a tag of it, as a dataset of Hugging Face ``datasets``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from persisting.data.checks import check_columns, check_fixed_where
from persisting.data.isolation import PerProcess, open_rows
from persisting.data.pin import Pin, pin_of
from persisting.errors import InvalidArgument

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_MOST_SHARDS = 128


def to_hf(
    path: str | Path,
    tag: str | None = None,
    *,
    streaming: bool = False,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset | IterableDataset:
    """Return the rows of a topic as a Hugging Face dataset; nothing is written to disk.

    A ``Dataset`` holds the rows in memory. With ``streaming``, an ``IterableDataset`` reads them as
    it is iterated: it has shards for workers and nodes, and its ``state_dict()`` resumes it.

    Parameters
    ----------
    path : str | Path
        The topic's folder, or its address in an object store: ``<storage_path>/<topic>``.
    tag : str, optional
        Read what this tag holds; without it, what was flushed.
    streaming : bool, optional
        Return an ``IterableDataset``.
    columns : list of str, optional
        Read only these fields.
    where : str, optional
        Only rows that match this SQL condition.
    storage_options : dict, optional
        Credentials and settings for a topic in an object store.
    """
    try:
        import datasets
        from datasets.iterable_dataset import ArrowExamplesIterable
    except ImportError as exc:
        raise InvalidArgument("to_hf needs Hugging Face datasets: pip install datasets") from exc
    check_fixed_where(where)
    tables = _Tables(pin_of(path, tag, storage_options), check_columns(columns), where)
    if not streaming:
        return datasets.Dataset(pa.Table.from_batches(tables.all(), schema=tables.schema))
    info = datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(tables.schema))
    return datasets.IterableDataset(
        ArrowExamplesIterable(tables, {"shards": tables.shards()}), info=info
    )


class _Tables:
    """Reads ranges of rows as tables. It pickles, so that workers can read."""

    def __init__(self, pin: Pin, columns: Sequence[str] | None, where: str | None) -> None:
        self._source = pin, columns, where
        self._rows = PerProcess(self._open)

    def _open(self) -> Any:
        return open_rows(*self._source)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._source

    def __setstate__(self, source: tuple[Any, ...]) -> None:
        self.__init__(*source)  # type: ignore[misc]

    @property
    def schema(self) -> pa.Schema:
        return self._rows.get().schema

    def shards(self) -> list[tuple[int, int]]:
        """Return ranges of rows of about the same size, none of them small."""
        rows = self._rows.get()
        count = max(1, min(_MOST_SHARDS, rows.size // rows.blocks.block_rows))
        cuts = [rows.size * number // count for number in range(count + 1)]
        return list(pairwise(cuts))

    def all(self) -> Iterator[pa.RecordBatch]:
        for _, table in self(self.shards()):
            yield from table.to_batches()

    def __call__(self, shards: list[tuple[int, int]]) -> Iterator[tuple[str, pa.Table]]:
        rows = self._rows.get()
        step = rows.blocks.block_rows
        for first, end in shards:
            for start in range(first, end, step):
                numbers = np.arange(start, min(end, start + step))
                yield f"{start}", pa.Table.from_batches([rows.fetch(numbers)])
