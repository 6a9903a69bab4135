"""Runs the command line as a process, with pipes or in a pseudo-terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from persisting.queue import write_queue
from support.children import interrupt

COMMAND = [sys.executable, "-m", "persisting.cli"]
DURABLE = {"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None}

OWNER = """
import asyncio, sys
from persisting.queue import write_queue

async def main():
    writer = await write_queue(
        topic=sys.argv[1], storage_path=sys.argv[2], backend="persisting", num_buckets=2,
        backend_options={"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": 0.05},
        local_socket=sys.argv[3] == "True",
    )
    async with writer:
        number = 0
        going = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        while not going.done():
            await writer.put({"id": f"live{number}", "n": number})
            number += 1
            if number == 20:
                print("open", flush=True)
            await asyncio.sleep(0.002)
    print(number, flush=True)

asyncio.run(main())
"""
"""Puts records into a topic until a line arrives on stdin; prints how many."""


CRASHING = """
import asyncio, os, sys
from persisting.queue import write_queue

async def main():
    writer = await write_queue(
        topic="t", storage_path=sys.argv[1], backend="persisting", num_buckets=1,
        backend_options={"enable_wal": True, "wal_sync_interval": 0.0, "flush_interval": None},
    )
    for number in range(5):
        await writer.put({"id": "a", "n": number})
    os._exit(9)

asyncio.run(main())
"""
"""Puts five records into a topic ``t`` and exits before they are flushed."""


class Answer(NamedTuple):
    """The exit code of a command and what it printed."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PERSISTING_", "COLUMNS"))}
    return {**kept, "PYTHONUNBUFFERED": "1", "TERM": "xterm-256color", **more}


def piped(*args: object, given: bytes = b"", env: dict[str, str] | None = None) -> Answer:
    """Run a command to its end with pipes for stdin, stdout and stderr."""
    done = subprocess.run(
        [*COMMAND, *map(str, args)],
        input=given,
        capture_output=True,
        timeout=280,
        check=False,
        env=environment(**(env or {})),
    )
    return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())


@contextmanager
def started(*args: object, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; it is killed at the end if it still runs."""
    given = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": environment(),
        **options,
    }
    child = subprocess.Popen([*COMMAND, *map(str, args)], **given)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def line_of(stream: Any) -> str:
    """Return the next line; fail if the command has ended without one."""
    line: bytes = stream.readline()
    assert line, "nothing was printed"
    return line.decode().rstrip("\n")


def stopped(child: subprocess.Popen[bytes], number: int = signal.SIGINT) -> Answer:
    """Send a signal and return how the command ended."""
    out, err = interrupt(child, number)
    return Answer(child.returncode, out.decode(), err.decode())


def in_terminal(
    *args: object, answer: str = "", width: int = 100, both: bool = True
) -> tuple[Answer, float]:
    """Run a command in a pseudo-terminal; without ``both``, stdout is a pipe.

    The answer has what was printed to the terminals; the float is the duration in seconds.
    """
    ours, theirs = pty.openpty()
    errors, their_errors = pty.openpty()
    os.set_inheritable(theirs, True)
    child = subprocess.Popen(
        [*COMMAND, *map(str, args)],
        stdin=theirs,
        stdout=theirs if both else subprocess.PIPE,
        stderr=their_errors,
        env=environment(COLUMNS=str(width)),
    )
    os.close(theirs)
    os.close(their_errors)
    if answer:
        os.write(ours, answer.encode())
    begun = time.monotonic()
    piped_out = b"" if both else _rest(child.stdout)
    shown, said = _drained({ours: b"", errors: b""}).values()
    child.wait(120)
    os.close(ours)
    os.close(errors)
    out = shown if both else piped_out
    return Answer(child.returncode, out.decode(), said.decode()), time.monotonic() - begun


def _rest(stream: Any) -> bytes:
    with stream:
        data: bytes = stream.read()
    return data


def _drained(texts: dict[int, bytes]) -> dict[int, bytes]:
    """Read everything from terminals until their other ends close."""
    living = set(texts)
    while living:
        for fd in select.select(list(living), [], [], 60)[0]:
            try:
                data = os.read(fd, 65536)
            except OSError:
                data = b""
            texts[fd] += data
            if not data:
                living.discard(fd)
    return texts


def plain(text: str) -> str:
    """Return the text of a terminal without colours and carriage returns."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def exported_numbers(call: Callable[..., Answer], storage: Path, topic: str = "t") -> list[int]:
    """Return the field ``n`` of all records that ``persisting export`` prints."""
    out = call("export", topic, "-", "-c", "n", "-s", storage).out
    return sorted(json.loads(line)["n"] for line in out.splitlines())


def files_in(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its content."""
    return {str(one.relative_to(folder)): one.read_bytes() for one in _files(folder)}


def _files(folder: Path) -> list[Path]:
    return sorted(one for one in folder.rglob("*") if one.is_file())


def filled(
    storage: Path, topic: str, records: list[dict[str, Any]], buckets: int = 2, **options: Any
) -> None:
    """Put records into a topic and close it."""

    async def put() -> None:
        writer = await write_queue(
            topic=topic,
            storage_path=str(storage),
            num_buckets=buckets,
            backend="persisting",
            backend_options={**DURABLE, **options},
        )
        async with writer:
            if records:
                await writer.put_batch(records)

    asyncio.run(put())


@contextmanager
def owner(
    storage: Path, topic: str, *, local_socket: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """Start another process that puts records into a topic until :func:`released`."""
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, topic, str(storage), str(local_socket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def released(child: subprocess.Popen[str]) -> int:
    """Stop an owner and return how many records it has put."""
    out, _ = child.communicate("\n", timeout=120)
    assert child.returncode == 0, "the owner was disturbed"
    return int(out)
