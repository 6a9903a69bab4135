"""Runs the console as a process, asks it over HTTP, and opens it in Chromium."""

from __future__ import annotations

import asyncio
import html
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import pytest

from support.waiting import until_true

_T = TypeVar("_T")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SCREENS = (
    "/",
    "/topics/runs",
    "/topics/runs/records",
    "/topics/runs/records/0/3",
    "/topics/runs/tail",
    "/topics/runs/search?text=lock",
    "/topics/runs/groups",
    "/topics/runs/versions",
    "/topics/runs/versions/compare?first=v1",
    "/topics/runs/maintenance",
)
HOSTILE = "<script>hacked=1</script>"
"""A value that sets window.hacked if a page does not escape it."""
HOSTILE_TOPIC = f"hostile {HOSTILE.replace('/', '')}"
HOSTILE_PATH = f"/topics/{quote(HOSTILE_TOPIC)}"
HOSTILE_GROUP = f"readers {HOSTILE.replace('/', '')}"
NO_BROWSER = (
    "the tests of the console need Chromium and found none: install it with 'apt-get install "
    "chromium', or with '.venv/bin/playwright install chromium'"
)


class Reply(NamedTuple):
    """An answer of the console."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


class RunningConsole:
    """A console that runs as a process."""

    def __init__(self, process: subprocess.Popen[str], port: int, token: str | None) -> None:
        self.process, self.port, self.token = process, port, token
        self.url = f"http://127.0.0.1:{port}"

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, dict(headers or {}))
            reply = connection.getresponse()
            named = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(reply.status, named, reply.read())
        finally:
            connection.close()

    def get(self, path: str, /, **parameters: object) -> Reply:
        query = urlencode(parameters)
        return self.ask("GET", f"{path}?{query}" if query else path)

    def post(self, path: str, /, **fields: object) -> Reply:
        headers = {"Origin": self.url, "Content-Type": "application/x-www-form-urlencoded"}
        return self.ask("POST", path, body=urlencode(fields), headers=headers)


@contextmanager
def running_console(storage: Path, *options: str) -> Iterator[RunningConsole]:
    """Run ``persisting ui`` on a free port until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "persisting.cli", "ui", "-s", str(storage), "-p", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("console http://"):
            process.kill()
            raise AssertionError(f"the console did not start: {line!r} {process.communicate()[1]}")
        address, _, query = line.split()[1].partition("?")
        port = int(address.rstrip("/").rpartition(":")[2])
        yield RunningConsole(process, port, query.removeprefix("token=") or None)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def files_of(storage: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file."""
    files = [path for path in storage.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def queries_of(pid: int) -> list[int]:
    """Return the living processes of a console that run queries."""
    return _children(pid, "persisting.ui.query_worker")


def samplers_of(pid: int) -> list[int]:
    """Return the live processes of a console that sample the topics."""
    return _children(pid, "persisting.ui.sample_worker")


def stop_queries_of(pid: int) -> list[int]:
    """Stop the processes of a console that run queries, so that a query does not end.

    There may be two: the console starts one beforehand, unless a query was faster.
    """
    stopped = queries_of(pid)
    assert stopped
    for query in stopped:
        os.kill(query, signal.SIGSTOP)
    return stopped


def _children(pid: int, module: str) -> list[int]:
    """Return the living children of a process that run a module, whichever thread started them."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += [int(child) for child in children.read_text().split()]
    return [child for child in found if _runs(child, module)]


def _runs(pid: int, module: str) -> bool:
    """Whether a process lives and runs a module."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and module in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False


def shown(page: str) -> str:
    """Return the text of a page without markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def positions(page: str) -> list[str]:
    """Return the positions of the records that a page lists."""
    return re.findall(r'<tr data-row><th scope="row"><a [^>]*>(\d+:\d+)</a>', page)


def page_when(console: RunningConsole, path: str, is_ready: Callable[[str], object]) -> str:
    """Return a page once it is ready."""
    page = ""

    def is_page_ready() -> object:
        nonlocal page
        page = console.ask("GET", path).text
        return is_ready(page)

    until_true(is_page_ready, lambda: page, tries=1200, interval=0.2)
    return page


def text_with(console: RunningConsole, path: str, part: str) -> str:
    """Return the text of a page once it contains a part."""
    return shown(page_when(console, path, lambda page: part in shown(page)))


def awaited(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine in a thread of its own: Playwright's loop runs in that of the tests."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def chromium() -> str | None:
    """Return the machine's Chromium; None if Playwright's own is installed. Fail without either."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        if Path(playwright.chromium.executable_path).exists():
            return None
    pytest.fail(NO_BROWSER)
