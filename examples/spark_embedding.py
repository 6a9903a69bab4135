"""A model step on Spark: embeds the texts of a topic, which are then found by their meaning.

    python examples/spark_embedding.py [folder]

The default folder is ./queue_storage. The step is a plain function over Arrow batches, which
``mapInArrow`` runs in Spark's Python workers: it loads a model once per task and passes it one
batch at a time. The model here only hashes words, so that nothing must be downloaded; replace it
with your own.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, FloatType, StructField, StructType

from persisting.queue import read_queue, write_queue
from persisting.spark import jobs, session

SIZE = 64
TEXTS = (
    "the cat sleeps on the warm sofa",
    "a dog runs in the park",
    "the stock market fell sharply today",
    "investors sold shares as the market fell",
    "a kitten and a cat play on the sofa",
    "the recipe needs flour, sugar and butter",
    "bake the cake with butter and sugar",
    "dogs love to run in a large park",
)


class HashingModel:
    """Maps every word to a direction and every text to the mean of its words."""

    def encode(self, texts: list[str]) -> np.ndarray:
        found = np.stack([sum(map(self._word, text.lower().split())) for text in texts])
        return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)

    def _word(self, word: str) -> np.ndarray:
        digest = hashlib.blake2b(word.strip(".,").encode(), digest_size=8).digest()
        return np.random.default_rng(int.from_bytes(digest, "big")).standard_normal(SIZE)


def embed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Embed batches; runs in a Python worker of Spark, once per task."""
    model = HashingModel()
    for batch in batches:
        if not batch.num_rows:
            continue
        vectors = model.encode(batch.column("text").to_pylist())
        column = pa.array(list(vectors), pa.list_(pa.float32()))
        yield batch.append_column("embedding", column)


def with_embeddings(rows: DataFrame) -> DataFrame:
    rows = rows.where("text is not null")
    schema = StructType([*rows.schema, StructField("embedding", ArrayType(FloatType()))])
    return rows.mapInArrow(embed, schema)


async def produce(folder: Path) -> None:
    writer = await write_queue(
        topic="texts", storage_path=str(folder), num_buckets=2, backend="persisting"
    )
    async with writer:
        await writer.put([{"id": number, "text": text} for number, text in enumerate(TEXTS)])


async def nearest(folder: Path, text: str) -> list[str]:
    vector = HashingModel().encode([text])[0]
    async with await read_queue(topic="embedded", storage_path=str(folder)) as reader:
        found = await reader.search(vector=vector, k=2, columns=["text"])
    return [hit["text"] for hit in found]


def main(folder: Path) -> None:
    spark = session("embedding")
    asyncio.run(produce(folder))
    step = jobs.incremental(
        spark,
        folder / "texts",
        folder / "embedded",
        with_embeddings,
        num_buckets=2,
        vectors={"embedding": SIZE},
    )
    print(f"embedded {step.written} texts")
    index = jobs.build_index(spark, folder / "embedded", column="embedding")
    print(f"index: {index['kind']} on {index['column']}")
    for question in (
        "a cat on the sofa",
        "shares fell on the market",
        "a cake with butter and sugar",
    ):
        print(f"{question}:")
        for text in asyncio.run(nearest(folder, question)):
            print(f"   {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "queue_storage"))
