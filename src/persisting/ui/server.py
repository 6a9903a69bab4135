"""Serves the console until it is interrupted."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from persisting.errors import StorageError
from persisting.ui.app import create_app
from persisting.ui.options import ConsoleOptions

if TYPE_CHECKING:
    from persisting.cluster.cluster_reader import ClusterReader

_STOP_SECONDS = 2
_MAX_CONNECTIONS = 256
_SWITCH_SECONDS = 0.001
"""Threads take turns this often, so that a request waits less for a thread that computes."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 takes a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host.strip("[]"), port))
    except OSError as exc:
        listening.close()
        raise StorageError(
            f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another --port"
        ) from exc
    return listening


def run(options: ConsoleOptions, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; ``ready`` is called when browsers are answered."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    asyncio.run(_serve(options, listening, ready))


async def _serve(
    options: ConsoleOptions, listening: socket.socket, ready: Callable[[], None]
) -> None:
    cluster = await _joined(options)
    config = uvicorn.Config(
        create_app(options, cluster),
        access_log=False,
        log_level="warning",
        server_header=False,
        lifespan="on",
        http="h11",  # not "auto", which depends on what else is installed
        ws="none",
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_STOP_SECONDS,
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = _Server(config, ready)
    try:
        await server.serve(sockets=[listening])
    finally:
        if cluster is not None:
            await cluster.close()
    if server.interrupted:
        raise KeyboardInterrupt


async def _joined(options: ConsoleOptions) -> ClusterReader | None:
    """Join the cluster whose seeds the options name, if they name any."""
    if not options.seeds:
        return None
    from persisting.cluster import ClusterReader

    return await ClusterReader.join(
        options.seeds, options.cluster_address, options.passphrase, options.join_seconds
    )


class _Server(uvicorn.Server):
    """A server that stops cleanly at SIGTERM, and immediately at a second Ctrl-C."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self.interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT:
            self.force_exit = self.interrupted
            self.interrupted = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What is loaded stays: a request must not wait until all of it is looked through for
        # garbage, which takes longer than most pages.
        gc.collect()
        gc.freeze()
        self._ready()
