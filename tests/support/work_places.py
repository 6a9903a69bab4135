"""Places for work groups: this process, another process on the folder, or a cluster."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

from persisting.local_socket import socket_groups
from persisting.local_socket.socket_groups import LocalKeeper
from persisting.queue import QueueWriter, WorkReader, read_queue, write_queue
from support import children

LOGGED = {"enable_wal": True, "wal_sync_interval": 0.0}

KEEPER = """
import asyncio, sys
from persisting.queue import read_queue

async def main():
    folder, topic, group, options = sys.argv[1:]
    reader = await read_queue(
        topic, storage_path=folder, group=group, mode="work", **eval(options)
    )
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await reader.close()

asyncio.run(main())
"""
"""A process that keeps a group until it is told to end."""

_KEEPERS = """
import asyncio, json, sys
from persisting.queue import read_queue

async def main():
    readers = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        given = json.loads(line)
        if given is None:
            for reader in readers:
                await reader.close()
            readers.clear()
        else:
            readers.append(await read_queue(mode="work", **given))
        print("done", flush=True)

asyncio.run(main())
"""
"""A process that opens a reader for each line, and closes all of them for the line ``null``."""


class WorkPlace:
    """Opens a topic and members of its work groups; the keepers are in this process."""

    def __init__(self, folder: Path | str, system: Any = None, **storage: Any) -> None:
        """``folder`` may also be an address in an object store; ``storage`` is passed on."""
        self.where = {"storage_path": str(folder), **storage}
        self.system = system
        self.topic = f"tasks-{uuid.uuid4().hex[:8]}"
        self._open: list[Any] = []

    @property
    def folder(self) -> Path:
        return Path(self.where["storage_path"])

    async def writer(self, count: int = 0, **given: Any) -> QueueWriter:
        """Return a writer of the topic, which has put ``count`` records."""
        arguments = {"backend": "persisting", "backend_options": LOGGED, "num_buckets": 2, **given}
        writer = await write_queue(self.system, topic=self.topic, **self.where, **arguments)
        self._open.append(writer)
        if count:
            await writer.put([{"id": number} for number in range(count)])
        return writer

    async def member(self, group: str = "solvers", **given: Any) -> WorkReader:
        """Return a new member of a group."""
        reader = await read_queue(
            self.system,
            topic=self.topic,
            group=group,
            mode="work",
            **self.where,
            **given,
        )
        self._open.append(reader)
        return reader

    def kept_here(self) -> LocalKeeper:
        """Return the only group of the topic that this process keeps."""
        kept = socket_groups._kept.groups.values()
        (local,) = [local for local in kept if local.place.config.topic == self.topic]
        return local

    async def close(self) -> None:
        for handle in reversed(self._open):
            await handle.close()


class KeeperProcess:
    """A process that keeps the groups of one test after the other: starting one is slow."""

    def __enter__(self) -> KeeperProcess:
        self._running = children.python(_KEEPERS)
        self._child = self._running.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._running.__exit__(None, None, None)

    async def _tell(self, given: dict[str, Any] | None) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(given) + "\n")
        self._child.stdin.flush()
        assert await asyncio.to_thread(children.wait_for_line, self._child) == "done"

    async def keep(self, **given: Any) -> None:
        """Open a reader."""
        await self._tell(given)

    async def close_readers(self) -> None:
        await self._tell(None)


class OtherProcess(WorkPlace):
    """The keepers are in another process."""

    def __init__(self, folder: Path | str, keepers: KeeperProcess, **storage: Any) -> None:
        super().__init__(folder, **storage)
        self._keepers = keepers
        self._kept: set[str] = set()

    async def member(self, group: str = "solvers", **given: Any) -> WorkReader:
        if group not in self._kept:
            self._kept.add(group)
            shared = {n: v for n, v in given.items() if n not in ("lease", "wait_for_topic")}
            await self._keepers.keep(topic=self.topic, group=group, **self.where, **shared)
        return await super().member(group, **given)

    async def close(self) -> None:
        await super().close()
        await self._keepers.close_readers()
