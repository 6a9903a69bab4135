"""An HTTP proxy before an object store: counts requests, and delays, holds, answers or loses them.

It runs in a thread of the test's process. Faults match requests by their kind: the method with its
condition (``PUT-if-absent``, ``PUT-if-match``, ``PUT``, ``GET``, ``LIST``, ``DELETE``), a space,
and the path.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
import urllib.parse
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

_LIMIT = 1 << 26
_CONDITION = re.compile(rb"(?im)^(if-match|if-none-match):[^\r]*\r\n")
_EXPECT = re.compile(rb"(?im)^expect:[^\r]*\r\n")


@dataclass
class Fault:
    """What happens to the requests whose kind contains ``match``, and ``also``."""

    match: str
    also: str = ""
    times: int = 1 << 60
    """How many requests meet it."""
    share: float = 1.0
    """The part of the requests that meets it, at random."""
    hold: float = 0.0
    """Seconds until the request is passed on, even if its sender has disconnected by then."""
    until: threading.Event | None = None
    """The request is passed on, or answered, when this is set."""
    answer: int = 0
    """A status to answer with, instead of passing the request on."""
    text: str = "<Error><Code>Injected</Code><Message>injected by the test</Message></Error>"
    """The body of that answer."""
    lose: bool = False
    """Pass the request on, and close the connection instead of answering."""
    drop: bool = False
    """Close the connection; the request is not passed on."""
    strip: bool = False
    """Pass the request on without its condition."""
    met: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    """Set when the first request meets it."""


class FaultProxy:
    """A running proxy; it listens on the address of its server."""

    def __init__(self, target: int, address: str = "127.0.0.1", port: int = 0) -> None:
        self._target, self._address, self._wanted_port = target, address, port
        self.delay = 0.0
        """Seconds added to every request."""
        self.counts: Counter[str] = Counter()
        """Requests by method."""
        self.seen: list[str] = []
        """The kinds of all requests, in order."""
        self.statuses: Counter[int] = Counter()
        """The server's answers by status."""
        self.slowest = 0.0
        """Seconds until the server's slowest answer, without delays of the proxy."""
        self.random = random.Random(1)
        self._faults: list[Fault] = []
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="fault-proxy")
        self._thread.start()
        self._started.wait()

    port: int

    def add(self, match: str, **what: object) -> Fault:
        fault = Fault(match, **what)  # type: ignore[arg-type]
        self._faults = [*self._faults, fault]
        return fault

    def heal(self) -> None:
        """Remove all faults and the delay."""
        self._faults, self.delay = [], 0.0

    def reset_counts(self) -> None:
        self.counts, self.seen, self.slowest = Counter(), [], 0.0
        self.statuses = Counter()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # In the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(
                self._serve, self._address, self._wanted_port, limit=_LIMIT, backlog=512
            )
        )
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                raw, line, fields = await _head(reader)
                body = await _body(reader, fields)
                kind = _kind(line, fields)
                self.counts[kind.split(" ")[0]] += 1
                self.seen.append(kind)
                fault = self._meet(kind)
                await asyncio.sleep(self.delay / 2 + fault.hold)
                while fault.until is not None and not fault.until.is_set():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                if fault.drop:
                    return
                if fault.answer:
                    writer.write(_answer(fault.answer, fault.text.encode()))
                    await writer.drain()
                    continue
                if upstream is None:
                    upstream = await asyncio.open_connection(
                        self._address, self._target, limit=_LIMIT
                    )
                raw = _EXPECT.sub(b"", raw)
                if fault.strip:
                    raw = _CONDITION.sub(b"", raw)
                sent = time.monotonic()
                upstream[1].write(raw + body)
                await upstream[1].drain()
                answer, answer_line, answer_fields = await _head(upstream[0])
                status = int(answer_line.split(" ")[1])
                self.statuses[status] += 1
                has_no_body = line.startswith("HEAD") or status in (204, 304)
                content = b"" if has_no_body else await _body(upstream[0], answer_fields)
                self.slowest = max(self.slowest, time.monotonic() - sent)
                await asyncio.sleep(self.delay / 2)
                if fault.lose:
                    return
                writer.write(answer + content)
                await writer.drain()
                if answer_fields.get(b"connection", b"").lower() == b"close":
                    upstream[1].close()
                    upstream = None
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            pass
        finally:
            with suppress(RuntimeError):  # the loop has ended
                writer.close()
                if upstream is not None:
                    upstream[1].close()

    def _meet(self, kind: str) -> Fault:
        for fault in self._faults:
            matches = fault.match in kind and fault.also in kind
            if matches and fault.met < fault.times:
                if fault.share >= 1 or self.random.random() < fault.share:
                    fault.met += 1
                    fault.reached.set()
                    return fault
        return Fault("")


async def _head(reader: asyncio.StreamReader) -> tuple[bytes, str, dict[bytes, bytes]]:
    data = await reader.readuntil(b"\r\n\r\n")
    first, *lines = data.split(b"\r\n")
    fields = {}
    for line in lines:
        name, _, value = line.partition(b":")
        fields[name.strip().lower()] = value.strip()
    return data, first.decode("latin1"), fields


async def _body(reader: asyncio.StreamReader, fields: dict[bytes, bytes]) -> bytes:
    if b"chunked" not in fields.get(b"transfer-encoding", b""):
        return await reader.readexactly(int(fields.get(b"content-length", 0)))
    content = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        content += line + await reader.readexactly(size + 2)
        if not size:
            return content


def _kind(line: str, fields: dict[bytes, bytes]) -> str:
    method, target, _ = line.split(" ")
    path, _, query = target.partition("?")
    given = urllib.parse.parse_qs(query)
    if method == "GET" and "list-type" in given:
        return f"LIST {path}/{given.get('prefix', [''])[0]}"
    if method == "POST" and "delete" in query:
        return f"DELETE {path}"
    if method == "PUT" and b"if-none-match" in fields:
        method = "PUT-if-absent"
    elif method == "PUT" and b"if-match" in fields:
        method = "PUT-if-match"
    return f"{method} {urllib.parse.unquote(path)}"


def _answer(status: int, text: bytes) -> bytes:
    return b"HTTP/1.1 %d Injected\r\nContent-Length: %d\r\n\r\n%b" % (status, len(text), text)
