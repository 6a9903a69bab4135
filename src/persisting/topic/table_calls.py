"""The calls that a bucket answers as a table, each as one typed value.

A call has a name (``op``) and arguments, which are what crosses to the owner of a bucket on a
cluster. :class:`TableRead` runs on any open table; :class:`TableChange` needs the bucket's owner.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

import pyarrow as pa

from persisting.errors import OffsetOutOfRange, StorageError
from persisting.table.versions import NOTHING

if TYPE_CHECKING:
    from persisting.backends.table_backend import TableBackend

T = TypeVar("T")
Record: TypeAlias = "dict[str, Any]"
BucketVersion: TypeAlias = "int | str | dt.datetime"


@dataclass(frozen=True)
class TableCall(Generic[T]):
    """One call to a bucket's table; ``T`` is the type of its result."""

    op: ClassVar[str]
    """The name of the call on the wire, and of the backend's method."""

    @property
    def args(self) -> dict[str, Any]:
        """The arguments by name, as the wire carries them.

        Arguments that older owners do not know are left out unless they are used.
        """
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if not item.metadata.get("new") or getattr(self, item.name) != item.default
        }

    async def run(self, backend: TableBackend) -> T:
        """Call the backend's method."""
        raise NotImplementedError


@dataclass(frozen=True)
class TableRead(TableCall[T]):
    """A call that changes nothing."""

    def without_bucket(self) -> T:
        """The result for a bucket that does not exist yet."""
        raise NotImplementedError


@dataclass(frozen=True)
class TableChange(TableCall[T]):
    """A call that changes the table, so only the bucket's owner can run it."""


@dataclass(frozen=True)
class _ListRead(TableRead["list[Any]"]):
    def without_bucket(self) -> list[Any]:
        return []


@dataclass(frozen=True)
class Versions(_ListRead):
    op = "versions"

    async def run(self, backend: TableBackend) -> list[Record]:
        return await backend.versions()


@dataclass(frozen=True)
class Tags(_ListRead):
    op = "tags"

    async def run(self, backend: TableBackend) -> list[Record]:
        return await backend.tags()


@dataclass(frozen=True)
class Resolve(TableRead[int]):
    """The number of a version that is given by number, tag or timestamp."""

    op = "resolve"
    version: BucketVersion

    async def run(self, backend: TableBackend) -> int:
        return await backend.resolve(self.version)

    def without_bucket(self) -> int:
        return NOTHING


@dataclass(frozen=True)
class Restores(TableRead["list[int]"]):
    """The end of the bucket after each of its restores."""

    op = "restores"

    async def run(self, backend: TableBackend) -> list[int]:
        return await backend.restores()

    def without_bucket(self) -> list[int]:
        return []


@dataclass(frozen=True)
class PendingDelays(_ListRead):
    """The delayed puts whose time has not come: first offset, rows and time of each."""

    op = "delays"

    async def run(self, backend: TableBackend) -> list[tuple[int, int, int]]:
        return await backend.delays()


@dataclass(frozen=True)
class ArrivalOf(TableRead[int]):
    """When the record at an offset arrived, in microseconds of Unix time; 0 if it is not there."""

    op = "arrival_of"
    offset: int

    async def run(self, backend: TableBackend) -> int:
        return await backend.arrival_of(self.offset)

    def without_bucket(self) -> int:
        return 0


@dataclass(frozen=True)
class ReadAt(_ListRead):
    """Records of a version."""

    op = "read_at"
    version: BucketVersion
    offset: int = 0
    limit: int | None = None

    async def run(self, backend: TableBackend) -> list[Record]:
        return await backend.read_at(self.version, self.offset, self.limit)


@dataclass(frozen=True)
class ArrowAt(TableRead[pa.Table]):
    """Rows of a version, as Arrow."""

    op = "arrow_at"
    version: BucketVersion
    offset: int = 0
    limit: int | None = None

    async def run(self, backend: TableBackend) -> pa.Table:
        return await backend.arrow_at(self.version, self.offset, self.limit)

    def without_bucket(self) -> pa.Table:
        return pa.table({})


@dataclass(frozen=True)
class Rankings(_ListRead):
    """The ranked hits of a search: one list for the vector, one for the words."""

    op = "rankings"
    vector: list[float] | None = None
    text: str | None = None
    column: str | list[str] | None = None
    k: int = 10
    where: str | None = None
    columns: list[str] | None = None
    metric: str | None = None
    exact: bool = False
    match: str = field(default="any", metadata={"new": True})
    fuzziness: int = field(default=0, metadata={"new": True})

    async def run(self, backend: TableBackend) -> list[list[Record]]:
        return await backend.rankings(**self.args)


@dataclass(frozen=True)
class Indexes(_ListRead):
    op = "indexes"

    async def run(self, backend: TableBackend) -> list[Record]:
        return await backend.indexes()


@dataclass(frozen=True)
class Take(_ListRead):
    """The records at some offsets."""

    op = "take"
    offsets: list[int]
    columns: list[str] | None = None

    async def run(self, backend: TableBackend) -> list[Record]:
        return await backend.take(self.offsets, self.columns)

    def without_bucket(self) -> list[Any]:
        if self.offsets:
            raise OffsetOutOfRange(f"there is no offset {self.offsets[0]}: the bucket is empty")
        return []


@dataclass(frozen=True)
class Query(_ListRead):
    """The records that match an SQL condition."""

    op = "query"
    where: str | None = None
    columns: list[str] | None = None
    limit: int | None = None

    async def run(self, backend: TableBackend) -> list[Record]:
        return await backend.query(self.where, self.columns, self.limit)


@dataclass(frozen=True)
class Count(TableRead[int]):
    """The number of records that match an SQL condition."""

    op = "count"
    where: str | None = None

    async def run(self, backend: TableBackend) -> int:
        return await backend.count(self.where)

    def without_bucket(self) -> int:
        return 0


@dataclass(frozen=True)
class Verify(TableRead[Record]):
    op = "verify"

    async def run(self, backend: TableBackend) -> Record:
        return await backend.verify()

    def without_bucket(self) -> Record:
        return {"ok": True, "rows": 0, "files": 0, "damaged": [], "unchecked": []}


@dataclass(frozen=True)
class MakeDurable(TableRead[int]):
    """Have the records before an offset survive power loss; returns up to which offset all do.

    A consumer asks for this before it stores its position. The owner of a bucket without a log does
    nothing: its records become durable with a flush. A reader of files syncs what it reads.
    """

    op = "make_durable"
    offset: int

    async def run(self, backend: TableBackend) -> int:
        return await backend.make_durable(self.offset)

    def without_bucket(self) -> int:
        return 0


@dataclass(frozen=True)
class Tag(TableChange[Record]):
    op = "tag"
    name: str
    empty: bool = False
    """Whether a bucket without records may be tagged."""

    async def run(self, backend: TableBackend) -> Record:
        return await backend.tag(self.name, empty=self.empty)


@dataclass(frozen=True)
class DeleteTag(TableChange[bool]):
    op = "delete_tag"
    name: str

    async def run(self, backend: TableBackend) -> bool:
        return await backend.delete_tag(self.name)


@dataclass(frozen=True)
class RestoreVersion(TableChange[Record]):
    op = "restore"
    version: BucketVersion
    token: str | None = None
    """Restoring again with the same token does nothing, so that a retry is safe."""

    async def run(self, backend: TableBackend) -> Record:
        return await backend.restore(self.version, token=self.token)


@dataclass(frozen=True)
class CreateIndex(TableChange[Record]):
    op = "create_index"
    column: str
    kind: str | None = None
    metric: str = "l2"
    language: str | None = field(default=None, metadata={"new": True})

    async def run(self, backend: TableBackend) -> Record:
        return await backend.create_index(
            self.column, self.kind, metric=self.metric, language=self.language
        )


@dataclass(frozen=True)
class DropIndex(TableChange[int]):
    op = "drop_index"
    column: str
    kind: str | None = None

    async def run(self, backend: TableBackend) -> int:
        return await backend.drop_index(self.column, self.kind)


@dataclass(frozen=True)
class Compact(TableChange["dict[str, int]"]):
    op = "compact"

    async def run(self, backend: TableBackend) -> dict[str, int]:
        return await backend.compact()


@dataclass(frozen=True)
class Retain(TableChange["dict[str, Any]"]):
    op = "retain"
    rows: int | None = None
    bytes: int | None = None
    seconds: float | None = None

    async def run(self, backend: TableBackend) -> dict[str, Any]:
        return await backend.retain(rows=self.rows, bytes=self.bytes, seconds=self.seconds)


_CALLS: dict[str, type[TableCall[Any]]] = {
    call.op: call
    for call in (
        Versions,
        ArrivalOf,
        PendingDelays,
        Tags,
        Resolve,
        Restores,
        ReadAt,
        ArrowAt,
        Rankings,
        Indexes,
        Take,
        Query,
        Count,
        Verify,
        MakeDurable,
        Tag,
        DeleteTag,
        RestoreVersion,
        CreateIndex,
        DropIndex,
        Compact,
        Retain,
    )
}


def parse_call(op: str, args: dict[str, Any]) -> TableCall[Any]:
    """Build the call that a request names, or raise if there is no such call."""
    if op not in _CALLS:
        raise StorageError(f"there is no call {op!r}")
    return _CALLS[op](**args)
