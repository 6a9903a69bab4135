"""The options of the backends: small frozen objects, checked once, when they are constructed.

Every default is documented with its consequence. Unknown names are ignored, as the protocol
requires, with one warning that suggests the nearest known names.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from persisting.errors import InvalidArgument

COMPRESSIONS = ("zstd", "lz4", "snappy")
VECTOR_TYPES = ("float64", "float32", "float16")
VECTOR_RULES = ("keep", "widen")
HOLDS = ("groups", "tags")
DURABLE = {"enable_wal": True, "wal_sync_interval": 0.0}
"""Options of a durable topic: an acknowledged record survives a crash and power loss."""
MIB = 1024 * 1024
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""One slash is enough, since a Path collapses two into one."""


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """The options of both table backends."""

    bucket_id: int
    """Number of the bucket in its topic."""

    storage_path: Path
    """The bucket's folder; created if it is missing. In an object store: a
    :class:`~persisting.store_address.StoreAddress`, which is used like a path."""

    batch_size: int = 100
    """Rows per page of reads and transfers. Larger pages cost memory and save round trips."""

    flush_threshold: int = 1000
    """Buffered rows of the bucket that start a flush, while further puts continue. A topic of four
    buckets may buffer four times as many. A lower value means more and smaller commits."""

    flush_interval: float | None = None
    """Seconds after which buffered rows are flushed even below the threshold; None: never."""

    compression: str | None = None
    """Codec of the table, and of log frames. None: Lance's own light encodings only."""

    vector_type: str = "float64"
    """Item type of vectors given as Python floats. A narrower one halves the space and rounds."""

    max_buffer_bytes: int = 64 * MIB
    """Buffered bytes above which a put waits for the flush. Bounds memory if the disk is slow."""

    compaction: bool = True
    """Join small fragments in the background. False: every flush leaves one fragment for good, and
    reads slow down with their number."""

    keep_versions: float | None = 600.0
    """Seconds that an old version without a tag stays readable. A read that takes longer starts
    again by itself. None keeps all versions, and the space they take."""

    retention_rows: int | None = None
    """Keep at least this many of the newest rows, and drop older ones by whole fragments."""

    retention_bytes: int | None = None
    """The same, by bytes of the table."""

    retention_seconds: float | None = None
    """Drop rows that arrived more than this many seconds ago, by whole fragments."""

    retention_waits_for: Sequence[str] = ()
    """What protects rows from retention: "groups" (keep rows that a consumer group has not
    committed), "tags" (keep rows of tagged versions). Work groups always protect the rows that they
    have not acknowledged, unless the next option is set."""

    retention_drops_unacknowledged: bool = False
    """Let retention drop rows that a work group has not acknowledged: they are lost for it."""

    schema_path: Path | None = None
    """A file with one schema for several buckets; set by topics."""

    groups_path: Path | None = None
    """The folder of the topic's consumer groups; set by topics."""

    read_only: bool = False
    """Open without the lock: sees flushed rows, new ones within 100 ms, and refuses writes."""

    def __post_init__(self) -> None:
        _integer("bucket_id", self.bucket_id, least=0)
        _integer("batch_size", self.batch_size, least=1)
        _integer("flush_threshold", self.flush_threshold, least=1)
        if self.flush_interval is not None:
            _seconds("flush_interval", self.flush_interval, zero=False)
        _one_of("compression", self.compression, (None, *COMPRESSIONS))
        _one_of("vector_type", self.vector_type, VECTOR_TYPES)
        _integer("max_buffer_bytes", self.max_buffer_bytes, least=1)
        _boolean("compaction", self.compaction)
        for name in ("keep_versions", "retention_seconds"):
            if getattr(self, name) is not None:
                _seconds(name, getattr(self, name), zero=False)
        for name in ("retention_rows", "retention_bytes"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), least=1)
        if isinstance(self.retention_waits_for, str) or not isinstance(
            self.retention_waits_for, Sequence
        ):
            raise InvalidArgument(
                f"retention_waits_for must be a list of names, got {self.retention_waits_for!r}"
            )
        for name in self.retention_waits_for:
            _one_of("each of retention_waits_for", name, HOLDS)
        _boolean("retention_drops_unacknowledged", self.retention_drops_unacknowledged)
        for name in ("schema_path", "groups_path"):
            path = getattr(self, name)
            if path is not None and not isinstance(path, (str, Path)):
                raise InvalidArgument(f"{name} must be a path, got {path!r}")
        _boolean("read_only", self.read_only)

    @property
    def is_logged(self) -> bool:
        """Whether records are logged before they are acknowledged."""
        return False


@dataclass(frozen=True, kw_only=True)
class PersistingOptions(BucketOptions):
    """The options of :class:`~persisting.queue.PersistingBackend`."""

    flush_interval: float | None = 5.0
    """Records of a slow topic reach the table, and so Spark, within this many seconds."""

    enable_wal: bool = False
    """Log every record before it is acknowledged. False: a crash loses unflushed records."""

    wal_sync_interval: float = 1.0
    """0.0: the log is synced before each acknowledgement, so acknowledged records survive power
    loss. t > 0: they survive a killed process immediately, and power loss after at most t
    seconds."""

    max_wal_size: int = 100 * MIB
    """Log bytes that force a flush. While that flush runs the log may grow to twice the size; then
    puts wait."""

    enable_metrics: bool = False
    """Export Prometheus metrics, labelled by topic and bucket."""

    owner_log: Any = None
    """The log that the buckets of a topic share; set by topics. None: the bucket has its own."""

    linger: float = 0.0
    """Only in an object store: seconds that a put may wait for others to share its object. Fewer
    requests, and that much more latency."""

    linger_bytes: int = 4 * MIB
    """Only in an object store: bytes of records at which an object is written without waiting. It
    also limits the size of an object, unless one put is larger."""

    lease: float = 5.0
    """Only in an object store: seconds without a heartbeat after which another process may take
    over the buckets. Shorter ones cost more requests, and pauses of the process lose ownership."""

    vectors: str = "keep"
    """"keep": a field with a vector index, or with 100 vectors of one length, refuses other
    lengths. "widen": a vector of another length turns the field into lists for good, and its
    vectors can no longer be searched."""

    schema_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values for fields that a record lacks, including rows stored before the field appeared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _boolean("enable_wal", self.enable_wal)
        _seconds("wal_sync_interval", self.wal_sync_interval, zero=True)
        _integer("max_wal_size", self.max_wal_size, least=1)
        _boolean("enable_metrics", self.enable_metrics)
        _seconds("linger", self.linger, zero=True)
        _integer("linger_bytes", self.linger_bytes, least=1)
        _seconds("lease", self.lease, zero=False)
        _one_of("vectors", self.vectors, VECTOR_RULES)
        if not isinstance(self.schema_defaults, Mapping):
            raise InvalidArgument(
                "schema_defaults must map field names to values, "
                f"got {type(self.schema_defaults).__name__}"
            )

    @property
    def is_logged(self) -> bool:
        return self.enable_wal


def storage_folder(path: Any) -> Path:
    """Return ``storage_path`` as an absolute path, or raise."""
    if not isinstance(path, (str, Path)) or not str(path):
        raise InvalidArgument(f"storage_path must be a folder's path, got {path!r}")
    if "\0" in str(path):
        raise InvalidArgument("storage_path contains a NUL character")
    folder = local_path("storage_path", path)
    try:
        os.fsencode(folder)
        is_file = folder.exists() and not folder.is_dir()
    except (OSError, ValueError) as exc:
        raise InvalidArgument(f"storage_path {str(path)!r} cannot be used: {exc}") from exc
    if is_file:
        raise InvalidArgument(f"storage_path {str(path)!r} is a file; name a folder")
    return folder


def local_path(what: str, path: str | Path) -> Path:
    """Return ``path`` as an absolute path; raise if it is an address or begins with ``~``.

    A folder whose name looks like an address can be given by its absolute path.
    """
    text = str(path)
    address = _ADDRESS.match(text)
    if address:
        raise InvalidArgument(
            f"{what} {text!r} is an address ({address[1]}:), and only write_queue, read_queue and "
            "some commands take topics in an object store: name a path in a file system of this "
            "machine"
        )
    if text.startswith("~") and not os.path.exists(text.split(os.sep)[0]):
        raise InvalidArgument(
            f"{what} {text!r} begins with '~', which only a shell expands: name the whole path"
        )
    return Path(path).absolute()


def take_known(kind: type[BucketOptions], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``given`` that ``kind`` knows; one warning names all others."""
    known = {f.name for f in fields(kind)}
    unknown = [name for name in given if name not in known]
    if unknown:
        hints = []
        for name in unknown:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hints.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        warnings.warn(
            f"ignored unknown backend option{'s' if len(unknown) > 1 else ''} {', '.join(hints)}",
            UserWarning,
            stacklevel=4,
        )
    return {name: value for name, value in given.items() if name in known}


def check_window(offset: Any, limit: Any) -> None:
    """Raise unless offset and limit are integers of 0 or more; the limit may be None."""
    _integer("offset", offset, least=0)
    if limit is not None:
        _integer("limit", limit, least=0)


def check_timeout(timeout: Any) -> None:
    """Raise unless ``timeout`` is a number of seconds or None; below 0 it has already expired."""
    if timeout is None:
        return
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or timeout != timeout:
        raise InvalidArgument(f"timeout must be a number of seconds, got {timeout!r}")


def _integer(name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise InvalidArgument(f"{name} must be at least {least}, got {value}")


def _seconds(name: str, value: Any, *, zero: bool) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidArgument(f"{name} must be a number of seconds, got {value!r}")
    if value < 0 or (value == 0 and not zero):
        raise InvalidArgument(f"{name} must be {'0 or more' if zero else 'above 0'}, got {value}")


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} must be True or False, got {value!r}")


def _one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise InvalidArgument(
            f"{name} must be one of {', '.join(repr(c) for c in choices)}, got {value!r}"
        )
