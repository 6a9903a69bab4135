"""The same operations in raw Lance and LanceDB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from tablebench.sizes import K

LANCE, LANCEDB = "raw Lance", "LanceDB"


def lancedb_table(folder: Path, table: pa.Table) -> Any | None:
    """Return the rows as a LanceDB table, or None if LanceDB is not installed."""
    try:
        import lancedb
    except ImportError:
        return None
    return lancedb.connect(str(folder / "lancedb")).create_table("t", table)


def lance_nearest(dataset: Any, query: np.ndarray, **how: Any) -> list[dict[str, Any]]:
    nearest = {"column": "v", "q": query, "k": K, **how}
    scanner = dataset.scanner(columns=["id", "_distance"], nearest=nearest)
    found: list[dict[str, Any]] = scanner.to_table().to_pylist()
    return found


def lancedb_nearest(
    table: Any, query: np.ndarray, *, flat: bool = False, probes: int | None = None
) -> list[dict[str, Any]]:
    search = table.search(query).select(["id", "_distance"]).limit(K)
    if flat:
        search = search.bypass_vector_index()
    if probes is not None:
        search = search.nprobes(probes)
    found: list[dict[str, Any]] = search.to_list()
    return found


def build_lance_index(dataset: Any, partitions: int) -> None:
    dataset.create_index("v", "IVF_FLAT", num_partitions=partitions, metric="l2")


def build_lancedb_index(table: Any, partitions: int) -> None:
    from lancedb.index import IvfFlat

    table.create_index("v", config=IvfFlat(distance_type="l2", num_partitions=partitions))


def write(folder: Path, table: pa.Table) -> Any:
    return lance.write_dataset(table, str(folder / "raw.lance"), enable_stable_row_ids=True)
