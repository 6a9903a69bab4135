"""Reads through another process where Lance cannot be used.

Lance starts threads, which a forked process does not have, and its locks may be held at the time of
the fork: calls in the child can crash or hang. So a process that was forked after Lance was loaded
never calls it, and starts an interpreter of its own that reads for it. The two exchange messages
over pipes: a header as msgpack, and rows as an Arrow stream. The helper ends when its pipe is
closed, even if the process that started it was killed.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, Generic, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from persisting import errors
from persisting.data.live_rows import LiveRead, LiveRows
from persisting.data.order import Blocks
from persisting.data.pin import Pin
from persisting.data.pinned_rows import PinnedRows
from persisting.data.place import Place
from persisting.errors import StorageError

T = TypeVar("T")

_PIPE_BYTES = 1024 * 1024
_SERVE = """
from persisting.arrow_loading import load_without_pandas
load_without_pandas()
from persisting.data.isolation import serve
serve()
"""


class Request(msgspec.Struct):
    """A call to the helper."""

    call: str
    pin: Pin | None = None
    place: Place | None = None
    columns: list[str] | None = None
    where: str | None = None
    numbers: bytes = b""
    bucket: int = 0
    offset: int = 0
    limit: int = 0


class Reply(msgspec.Struct):
    """The answer, which rows may follow."""

    error: str = ""
    message: str = ""
    values: dict[str, Any] = {}
    has_rows: bool = False


class Helper:
    """A process that reads for this one. It starts with the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def call(self, request: Request) -> tuple[dict[str, Any], pa.RecordBatch | None]:
        """Send a request and return the answer, or raise the error of the helper."""
        with self._lock:
            if self._process is None:
                self._process = _start()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _send(process.stdin, request)
                reply = _receive(process.stdout, Reply)
                if reply is None:
                    raise BrokenPipeError
                rows = _receive_rows(process.stdout) if reply.has_rows else None
            except BaseException as exc:
                # The rest of an answer may still be in the pipe: never use this helper again.
                process.kill()
                process.wait()
                self._process = None
                if isinstance(exc, (OSError, pa.ArrowException)):
                    raise StorageError(
                        "the process that reads for this forked process has ended; its output "
                        "says why"
                    ) from exc
                raise
        if reply.error:
            raise _error(reply)
        return reply.values, rows

    def __del__(self) -> None:
        process = self._process
        if process is not None and self._owner == os.getpid():  # not in a fork of the owner
            process.kill()
            process.wait()


class IsolatedRows:
    """The rows of a pin, read by a helper; see :class:`~persisting.data.pinned_rows.PinnedRows`."""

    def __init__(self, pin: Pin, columns: Sequence[str] | None, where: str | None) -> None:
        self._helper = Helper()
        request = Request("open", pin, columns=_listed(columns), where=where)
        values, _ = self._helper.call(request)
        self.size: int = values["size"]
        self.blocks = Blocks(*values["blocks"])
        self.schema = pa.ipc.read_schema(pa.py_buffer(values["schema"]))

    def fetch(self, numbers: np.ndarray) -> pa.RecordBatch:
        wanted = np.ascontiguousarray(numbers, "<i8").tobytes()
        rows = self._helper.call(Request("fetch", numbers=wanted))[1]
        assert rows is not None
        return rows


class IsolatedLiveRows:
    """A growing topic, read by a helper; see :class:`~persisting.data.live_rows.LiveRows`."""

    def __init__(self, place: Place, columns: Sequence[str] | None, where: str | None) -> None:
        self._helper = Helper()
        request = Request("follow", place=place, columns=_listed(columns), where=where)
        values, _ = self._helper.call(request)
        self.topic_id: str = values["topic"]
        self.buckets: int = values["buckets"]

    def read(self, bucket: int, offset: int, limit: int) -> LiveRead:
        request = Request("read", bucket=bucket, offset=offset, limit=limit)
        values, rows = self._helper.call(request)
        return LiveRead(**values, rows=rows)


def open_rows(
    pin: Pin, columns: Sequence[str] | None, where: str | None
) -> PinnedRows | IsolatedRows:
    """Open the rows of a pin, in the way that is safe in this process."""
    if lance_is_unsafe():
        return IsolatedRows(pin, columns, where)
    return PinnedRows(pin, columns, where)


def open_live(
    place: Place, columns: Sequence[str] | None, where: str | None
) -> LiveRows | IsolatedLiveRows:
    """Open a growing topic, in the way that is safe in this process."""
    if lance_is_unsafe():
        return IsolatedLiveRows(place, columns, where)
    return LiveRows(place, columns, where)


class PerProcess(Generic[T]):
    """Opens something in each process that uses it: a handle does not outlive a fork."""

    def __init__(self, open_here: Callable[[], T]) -> None:
        self._open_here = open_here
        self._value: T | None = None
        self._owner = 0

    def get(self) -> T:
        """Return the handle of this process."""
        if self._value is None or self._owner != os.getpid():
            if self._value is not None:
                # Not even closed here: its threads and its helper belong to the parent.
                _of_parents.append(self._value)
            self._value, self._owner = self._open_here(), os.getpid()
        return self._value

    def expire(self) -> None:
        """Open again at the next use."""
        if self._value is not None and self._owner != os.getpid():
            _of_parents.append(self._value)
        self._value = None


class OpensPerProcess:
    """A base for what reads rows and pickles: the copy in another process opens its own rows."""

    _rows: PerProcess[Any]

    def _open(self) -> Any:
        """Return the rows, opened for this process."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_rows"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rows = PerProcess(self._open)


_of_parents: list[Any] = []


def lance_is_unsafe() -> bool:
    """Whether this process was forked from one that had loaded Lance."""
    return _unsafe


def _forked_with_lance() -> bool:
    forked = type(multiprocessing.current_process()).__name__ == "ForkProcess"
    return forked and "lance" in sys.modules


_unsafe = _forked_with_lance()
"""For the case that this module is loaded after the fork."""


def _after_fork() -> None:
    global _unsafe
    _unsafe = _unsafe or "lance" in sys.modules


os.register_at_fork(after_in_child=_after_fork)


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(folder for folder in sys.path if folder)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the process that reads, which then closes the pipe
    )
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        _enlarge(pipe)
    return process


def _enlarge(pipe: IO[bytes]) -> None:
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):  # beyond the user's limit: the pipe works with its usual size
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _listed(columns: Sequence[str] | None) -> list[str] | None:
    return None if columns is None else list(columns)


def _error(reply: Reply) -> Exception:
    kind = getattr(errors, reply.error, None)
    if isinstance(kind, type) and issubclass(kind, StorageError):
        return kind(reply.message)
    return StorageError(f"{reply.error}: {reply.message}")


def _send(pipe: IO[bytes], message: msgspec.Struct, rows: pa.RecordBatch | None = None) -> None:
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(8, "little") + data)
    if rows is not None:
        with pa.ipc.new_stream(pipe, rows.schema) as stream:
            stream.write_batch(rows)
    pipe.flush()


def _receive(pipe: IO[bytes], kind: type[Any]) -> Any:
    """Read a message, None at the end of the pipe."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    return msgspec.msgpack.decode(pipe.read(int.from_bytes(head, "little")), type=kind)


def _receive_rows(pipe: IO[bytes]) -> pa.RecordBatch:
    with pa.ipc.open_stream(pipe) as stream:
        rows = stream.read_next_batch()
        for _ in stream:  # reads the end mark
            raise StorageError("the helper sent more rows than it was asked for")
        return rows


class _Server:
    """What the helper has open."""

    def __init__(self) -> None:
        self._rows: PinnedRows | None = None
        self._live: LiveRows | None = None

    def answer(self, request: Request) -> tuple[dict[str, Any], pa.RecordBatch | None]:
        if request.call == "open":
            assert request.pin is not None
            rows = self._rows = PinnedRows(request.pin, request.columns, request.where)
            schema = rows.schema.serialize().to_pybytes()
            blocks = [rows.blocks.block_rows, rows.blocks.window_blocks]
            return {"size": rows.size, "blocks": blocks, "schema": schema}, None
        if request.call == "fetch":
            assert self._rows is not None
            return {}, self._rows.fetch(np.frombuffer(request.numbers, "<i8"))
        if request.call == "follow":
            assert request.place is not None
            live = self._live = LiveRows(request.place, request.columns, request.where)
            return {"topic": live.topic_id, "buckets": live.buckets}, None
        assert self._live is not None
        read = self._live.read(request.bucket, request.offset, request.limit)
        values = read._asdict()
        return values, values.pop("rows")


def serve() -> None:
    """Answer requests from standard input until it is closed."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the messages
    server = _Server()
    while (request := _receive(requests, Request)) is not None:
        try:
            values, rows = server.answer(request)
        except Exception as exc:
            _send(replies, Reply(type(exc).__name__, str(exc)))
        else:
            _send(replies, Reply(values=values, has_rows=rows is not None), rows)
