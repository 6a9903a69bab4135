"""A topic, or a tag of it, as a map-style dataset."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from persisting.data.batch_formats import NUMPY, PYTHON, TORCH, check_format, to_rows
from persisting.data.checks import check_columns, check_fixed_where
from persisting.data.isolation import OpensPerProcess, PerProcess, open_rows
from persisting.data.pin import pin_of


class TopicDataset(OpensPerProcess):
    """The rows of a topic by number, for ``torch.utils.data.DataLoader`` and the like.

    The rows are fixed when the dataset is created: those of the tag, or without a tag everything
    that was flushed. They are numbered bucket by bucket, in the order of their offsets; a condition
    numbers only the rows that match. A dataset pickles, and can be used in processes that were
    spawned or forked.

    Parameters
    ----------
    path : str | Path
        The topic's folder, or its address in an object store: ``<storage_path>/<topic>``.
    tag : str, optional
        Read what this tag holds. Without a tag, the versions that are read are removed
        ``keep_versions`` seconds after newer ones replaced them.
    columns : list of str, optional
        Read only these fields.
    where : str, optional
        Only rows that match this SQL condition. Each process finds them once, when it reads first.
    format : str, optional
        The values of a row: "python" (default), "numpy" or "torch".
    storage_options : dict, optional
        Credentials and settings for a topic in an object store; without them, those of the
        environment. They are pickled with the dataset for its workers.
    """

    def __init__(
        self,
        path: str | Path,
        tag: str | None = None,
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        format: str = PYTHON,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_format(format, (PYTHON, NUMPY, TORCH))
        check_fixed_where(where)
        self._format, self._where = format, where
        self._columns = check_columns(columns)
        self._pin = pin_of(path, tag, storage_options)
        self._rows = PerProcess(self._open)
        self._size = self._rows.get().size

    def _open(self) -> Any:
        return open_rows(self._pin, self._columns, self._where)

    @property
    def schema(self) -> pa.Schema:
        """The fields of the rows."""
        return self._rows.get().schema

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows with one read; a DataLoader calls it for each batch."""
        return to_rows(self.take(indices), self._format)

    def take(self, indices: Sequence[int]) -> pa.RecordBatch:
        """Return the rows with these numbers as an Arrow batch, in that order."""
        numbers = np.fromiter(map(operator.index, indices), np.int64)
        if len(numbers) and (numbers.min() < -self._size or numbers.max() >= self._size):
            wrong = next(int(n) for n in numbers if not -self._size <= n < self._size)
            raise IndexError(f"there is no row {wrong}: the dataset has {self._size} rows")
        numbers = np.where(numbers < 0, numbers + self._size, numbers)
        order = np.argsort(numbers, kind="stable")
        rows: pa.RecordBatch = self._rows.get().fetch(numbers[order])
        return rows.take(pa.array(np.argsort(order)))

    def __repr__(self) -> str:
        return f"<TopicDataset of {self._pin.source}: {self._size} rows>"
