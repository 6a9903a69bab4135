"""Text search and rank fusion."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from corebench import records
from corebench.report import Run, stopwatch

from persisting.queue import LanceBackend
from tablebench import others
from tablebench.others import LANCE, LANCEDB
from tablebench.sizes import OURS, K, Sizes, add_latency, in_turns


def words(run: Run, sizes: Sizes) -> None:
    """Texts of seven words, asked for by two of them, with a text index."""
    with run.scratch() as folder:
        asyncio.run(_words(run, folder, sizes))


async def _words(run: Run, folder: Path, sizes: Sizes) -> None:
    rows = list(records.stream(sizes.vectors))
    table = pa.table({name: [row[name] for row in rows] for name in ("id", "text")})
    luck = random.Random(4)
    asked = [" ".join(luck.choice(rows)["text"].split()[:2]) for _ in range(sizes.queries)]
    backend = LanceBackend(bucket_id=0, storage_path=str(folder / "ours"), compaction=False)
    await backend.put_arrow(table)
    await backend.flush()
    raw = others.write(folder, table)
    beside_db = others.lancedb_table(folder, table)
    with stopwatch() as built:
        await backend.create_index("text", "text")
    with stopwatch() as built_raw:
        raw.create_scalar_index("text", "INVERTED", stem=False, remove_stop_words=False)
    run.add("words", "building the text index", built(), "s", LANCE, built_raw())
    raw = lance.dataset(raw.uri)

    async def ours(text: str) -> list[dict[str, Any]]:
        return await backend.search(text=text, column="text", k=K, columns=["id"])

    calls: dict[str, Any] = {OURS: ours, LANCE: partial(_lance, raw)}
    if beside_db is not None:
        with stopwatch() as built_db:
            beside_db.create_fts_index("text", stem=False, remove_stop_words=False)
        run.add("words", "building the text index", built(), "s", LANCEDB, built_db())
        calls[LANCEDB] = partial(_lancedb, beside_db)
    add_latency(run, "words", "two words, indexed", await in_turns(calls, asked))
    await backend.drop_index("text")
    add_latency(run, "words", "two words, no index", await in_turns({OURS: ours}, asked[:10]))
    await backend.close()


def _lance(dataset: Any, text: str) -> list[dict[str, Any]]:
    scanner = dataset.scanner(columns=["id", "_score"], full_text_query=text, limit=K)
    found: list[dict[str, Any]] = scanner.to_table().to_pylist()
    return found


def _lancedb(table: Any, text: str) -> list[dict[str, Any]]:
    search = table.search(text, query_type="fts").select(["id", "_score"]).limit(K)
    found: list[dict[str, Any]] = search.to_list()
    return found
