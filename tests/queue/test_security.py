"""The promises of SECURITY.md: names stay inside their folder, files are private, nothing listens
on the network, and stored data is never executed."""

from __future__ import annotations

import ast
import asyncio
import os
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

import persisting
from persisting import metrics
from persisting.cli.metrics_exporter import serve
from persisting.errors import StorageError
from persisting.queue import read_queue, write_queue

SECRET = "nobody-should-see-this"
OUTSIDE = ["..", "../x", "a/b", "/etc/x", "a\\b", "a\0b", ".hidden", "", "a\nb"]
DURABLE = {"enable_wal": True, "wal_sync_interval": 0.0, "enable_metrics": True}
FORBIDDEN = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "yaml"}
UNPICKLERS = {"CPickleSerializer", "PickleSerializer", "CloudPickleSerializer", "read_object"}
CALLS = {"eval", "exec", "compile", "__import__"}


async def filled(home: Path) -> None:
    async with await write_queue(
        topic="t",
        storage_path=str(home),
        num_buckets=2,
        backend="persisting",
        backend_options=DURABLE,
    ) as writer:
        await writer.put([{"id": f"{SECRET}-{n}", "text": SECRET, "n": n} for n in range(50)])
        await writer.flush()
        await writer.put({"id": "last", "text": SECRET, "n": 99})
        await writer.tag("v1")
        await writer.create_index("n")
        async with await read_queue(
            topic="t", storage_path=str(home), group="g", enable_metrics=True
        ) as reader:
            await reader.get(limit=10)
            await reader.commit()


@pytest.mark.parametrize("name", OUTSIDE)
async def test_names_cannot_leave_the_storage_folder(tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    await filled(home)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageError):
        await write_queue(topic=name, storage_path=str(home), backend="persisting")
    with pytest.raises(StorageError):
        await read_queue(topic="t", storage_path=str(home), group=name)
    async with await read_queue(topic="t", storage_path=str(home)) as reader:
        with pytest.raises(StorageError):
            await reader.tag(name)
        with pytest.raises(StorageError):
            await reader.delete_tag(name)
        with pytest.raises(StorageError):
            await reader.get(version=name)
        with pytest.raises(StorageError):
            await reader.create_index(name)
    assert sorted(tmp_path.rglob("*")) == before


async def test_created_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    home = tmp_path / "made" / "home"
    before = os.umask(0)
    try:
        await filled(home)
    finally:
        os.umask(before)
    folders = [home, home / "t", *(one for one in (home / "t").iterdir() if one.is_dir())]
    assert len(folders) >= 6
    for folder in folders:
        assert folder.stat().st_mode & 0o077 == 0, folder
    for file in (home / "t").rglob("*"):
        if file.is_file() and "data.lance" not in file.parts:
            assert file.stat().st_mode & 0o077 == 0, file


def scraped(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


async def test_metrics_expose_no_record_content(tmp_path: Path) -> None:
    inside, outside = metrics.serve(port=0), serve(str(tmp_path), 0, "127.0.0.1")
    try:
        async with await write_queue(
            topic="t", storage_path=str(tmp_path), backend="persisting", backend_options=DURABLE
        ) as writer:
            await writer.put([{"id": f"{SECRET}-{n}", "text": SECRET} for n in range(50)])
            await writer.flush()
            for server in (inside, outside):
                text = await asyncio.to_thread(scraped, server.server_port)
                assert 'topic="t"' in text
                assert SECRET not in text
    finally:
        for server in (inside, outside):
            server.shutdown()
            server.server_close()


def listening() -> set[str]:
    """Return the listening sockets of this process."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and f"socket:[{parts[9]}]" in mine:
                found.add(parts[1])
    return found


async def test_topic_opens_no_port_and_metrics_listen_on_localhost_only(tmp_path: Path) -> None:
    before = listening()
    await filled(tmp_path)
    assert listening() == before
    server = metrics.serve(port=0)
    try:
        (opened,) = listening() - before
        assert opened.startswith("0100007F:")
    finally:
        server.shutdown()
        server.server_close()


def test_package_never_executes_stored_data() -> None:
    """Only Arrow, Lance, msgspec and struct decode what is read from disk."""
    for path in Path(persisting.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[Any] = []
            if isinstance(node, ast.Import):
                names = [one.name.partition(".")[0] for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module.partition(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                # A literal is our own code, not data.
                literal = all(isinstance(argument, ast.Constant) for argument in node.args)
                assert literal or node.func.id not in CALLS, f"{path}:{node.lineno}"
            if isinstance(node, ast.ImportFrom):
                assert not UNPICKLERS & {one.name for one in node.names}, f"{path}:{node.lineno}"
            elif isinstance(node, ast.Attribute):
                assert node.attr not in UNPICKLERS, f"{path}:{node.lineno}"
            assert not FORBIDDEN & set(names), f"{path}:{node.lineno}"
