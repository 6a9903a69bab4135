"""Shuffled reads of one epoch, in batches, by each system's own means.

Each reader yields the number of rows of one batch after the other, in the fastest format that the
system has. What they call a shuffle differs: see the docstrings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from trainingbench.rows import BATCH, TAG, tables


def ours(topic: Path) -> Iterator[int]:
    """A permutation of blocks of 1 MiB, and of all rows of 32 blocks."""
    from persisting.data import TopicStream

    for batch in TopicStream(topic, TAG, batch_size=BATCH, shuffle=1):
        yield batch.num_rows


def ours_torch(topic: Path) -> Iterator[int]:
    """The same as dicts of tensors."""
    import torch  # noqa: F401

    from persisting.data import TopicStream

    for batch in TopicStream(topic, TAG, batch_size=BATCH, shuffle=1, format="torch"):
        yield len(batch["id"])


def store_lancedb(folder: Path, rows: int) -> Path:
    import lancedb

    parts = tables(rows)
    table = lancedb.connect(folder).create_table("rows", next(parts))
    for part in parts:
        table.add(part)
    table.optimize()
    return folder


def lancedb_permutation(folder: Path, clump: int | None = None) -> Iterator[int]:
    """A permutation of all rows, or of clumps of rows."""
    import lancedb
    from lancedb.permutation import Permutation, permutation_builder

    table = lancedb.connect(folder).open_table("rows")
    order = permutation_builder(table).shuffle(seed=1, clump_size=clump).execute()
    for batch in Permutation.from_tables(table, order).with_format("arrow").iter(BATCH):
        yield batch.num_rows


def lancedb_clumps(folder: Path) -> Iterator[int]:
    """A permutation of clumps of 1,000 rows, which are read in order: no shuffle within them."""
    return lancedb_permutation(folder, 1000)


def lancedb_streaming(folder: Path) -> Iterator[int]:
    """A permutation of all rows; it yields one row after the other."""
    import lancedb
    from lancedb.streaming import StreamingDataset

    table = lancedb.connect(folder).open_table("rows")
    rows = StreamingDataset(table, num_splits=1, shuffle_seed=1, read_batch_size=1024)
    for _, count in _batched(rows):
        yield count


def store_parquet(folder: Path, rows: int) -> Path:
    import pyarrow.parquet as pq

    folder.mkdir()
    for number, part in enumerate(tables(rows)):
        pq.write_table(part, folder / f"{number:04}.parquet", row_group_size=10_000)
    return folder


def hugging_face(folder: Path) -> Iterator[int]:
    """A permutation of files, and a buffer of 10,000 rows."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import datasets

    datasets.disable_progress_bars()
    files = sorted(str(path) for path in folder.glob("*.parquet"))
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    shuffled = stream.with_format("arrow").shuffle(seed=1, buffer_size=10_000)
    for batch in shuffled.iter(BATCH):
        yield len(batch)


def store_mosaic(folder: Path, rows: int) -> Path:
    from streaming import MDSWriter

    columns = {
        "id": "int",
        "reward": "float64",
        "text": "str",
        "embedding": "ndarray:float32:128",
    }
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for part in tables(rows):
            vectors = part["embedding"].chunk(0).flatten().to_numpy().reshape(part.num_rows, -1)
            texts = part["text"].to_pylist()
            numbers = zip(part["id"].to_pylist(), part["reward"].to_pylist(), strict=True)
            for row, (number, reward) in enumerate(numbers):
                writer.write(
                    {"id": number, "reward": reward, "text": texts[row], "embedding": vectors[row]}
                )
    return folder


def mosaic(folder: Path) -> Iterator[int]:
    """A permutation of shards, and of rows in blocks of 2**18."""
    import streaming

    streaming.base.util.clean_stale_shared_memory()
    stream = streaming.StreamingDataset(
        local=str(folder), shuffle=True, shuffle_seed=1, batch_size=BATCH
    )
    for _, count in _batched(stream):
        yield count


def _batched(rows: Iterable[object]) -> Iterator[tuple[list[object], int]]:
    batch: list[object] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH:
            yield batch, BATCH
            batch = []
    yield batch, len(batch)


MOSAIC = "mosaicml-streaming"
Store = Callable[[Path, int], Path]
Read = Callable[[Path], Iterator[int]]
PEERS: dict[str, tuple[Store, Read]] = {
    "lancedb, permutation": (store_lancedb, lancedb_permutation),
    "lancedb, clumps of 1,000": (store_lancedb, lancedb_clumps),
    "lancedb, StreamingDataset": (store_lancedb, lancedb_streaming),
    "HF datasets, Parquet": (store_parquet, hugging_face),
    MOSAIC: (store_mosaic, mosaic),
}
SHUFFLES_ROWS = tuple(name for name in PEERS if name != "lancedb, clumps of 1,000")
"""Peers whose batches hold rows of many places. Clumps are only printed for comparison."""

_LANCEDB = ("lancedb", "lancedb.permutation", "lancedb.streaming", "torch")
IMPORTED: dict[str, tuple[str, ...]] = {
    "ours": ("lance", "persisting.data.stream"),
    "ours, as tensors": ("lance", "torch", "persisting.data.torch_stream"),
    "lancedb, permutation": _LANCEDB,
    "lancedb, clumps of 1,000": _LANCEDB,
    "lancedb, StreamingDataset": _LANCEDB,
    "HF datasets, Parquet": ("torch", "datasets", "pyarrow.parquet"),
    MOSAIC: ("streaming",),
}
"""What a reader imports before its time starts."""
