"""Raw Lance and LanceDB, with one append per put; neither syncs its files."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from peersbench.peer import Peer, in_process
from peersbench.record_kinds import DIMENSIONS, Kind, Record
from peersbench.workload import Store, in_turns

_TYPES = {
    "value": pa.int64(),
    "score": pa.float64(),
    "vector": pa.list_(pa.float32(), DIMENSIONS),
}


def _schema(kind: Kind) -> pa.Schema:
    return pa.schema([(name, _TYPES.get(name, pa.string())) for name in kind.fields])


class TableStore(Store):
    """A table with one appending caller at a time: concurrent commits would conflict."""

    def append(self, rows: list[Record]) -> None:
        raise NotImplementedError

    def ingest(self, batches: Iterable[list[Record]]) -> None:
        for batch in batches:
            self.append(batch)

    def singles(self, rows: Iterable[Record]) -> None:
        for row in rows:
            self.append([row])

    def many_producers(self, shares: list[Iterable[Record]]) -> None:
        self.singles(in_turns(shares))

    def close(self) -> None:
        pass


class LanceStore(TableStore):
    """A Lance dataset."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._schema = _schema(kind)
        self._dataset = lance.write_dataset(
            self._schema.empty_table(), str(folder / "raw.lance"), mode="create"
        )

    def append(self, rows: list[Record]) -> None:
        table = pa.Table.from_pylist(rows, schema=self._schema)
        self._dataset = lance.write_dataset(table, self._dataset, mode="append")

    def drain(self) -> list[Record]:
        found: list[Record] = self._dataset.to_table().to_pylist()
        return found


class LanceDBStore(TableStore):
    """A table of a local LanceDB database."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        import lancedb

        database = lancedb.connect(str(folder / "lancedb"))
        self._table: Any = database.create_table("records", schema=_schema(kind))

    def append(self, rows: list[Record]) -> None:
        self._table.add(rows)

    def drain(self) -> list[Record]:
        found: list[Record] = self._table.to_arrow().to_pylist()
        return found


def _lancedb_missing() -> str | None:
    return None if find_spec("lancedb") else "lancedb is not installed"


def _lancedb_version() -> str:
    import lancedb

    return f"LanceDB {lancedb.__version__}"


LANCE = Peer(
    "raw Lance", "not synced", in_process(LanceStore), version=lambda: f"Lance {lance.__version__}"
)
LANCEDB = Peer(
    "LanceDB", "not synced", in_process(LanceDBStore), _lancedb_missing, _lancedb_version
)
