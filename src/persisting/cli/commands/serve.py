"""``serve``: runs a storage node of a Pulsing cluster."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from persisting.cli import output, parameters, topics_access

if TYPE_CHECKING:
    from persisting.cluster.node import NodeOptions, StorageNode


@click.command()
@click.option(
    "--address",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Address at which other nodes and clients reach this one; port 0 takes a free port.",
)
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    metavar="HOST:PORT",
    help="Address of another node of the cluster; may be repeated. Without it, a cluster begins.",
)
@click.option(
    "--passphrase",
    envvar="PERSISTING_PASSPHRASE",
    show_envvar=True,
    help="Encrypt all connections; every node and client needs the same passphrase.",
)
@click.option(
    "--passphrase-file",
    type=click.Path(exists=True, dir_okay=False),
    help="File whose first line is the passphrase, so that it does not appear in lists of "
    "processes.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve Prometheus metrics of this node at /metrics on this port; 0 takes a free port.",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    help="Address of this machine on which metrics are served.",
)
@parameters.duration("--health-interval", "60s", "Time between health lines; 0 prints none.")
@parameters.duration("--join-timeout", "30s", "How long to wait for a seed to answer.")
@parameters.storage
def serve(
    address: str,
    seeds: tuple[str, ...],
    passphrase: str | None,
    passphrase_file: str | None,
    metrics_port: int | None,
    metrics_host: str,
    health_interval: float,
    join_timeout: float,
    storage: str,
) -> None:
    """Run a storage node of a Pulsing cluster, which owns buckets until SIGTERM or Ctrl-C.

    Prints one line when it is ready, and a health line from time to time. At SIGTERM it flushes and
    closes its buckets, so that other nodes take over immediately, and exits with 0. It owns only
    topics in the storage folder, which all nodes of the cluster share, or below an address in an
    object store. Needs persisting[pulsing].

    \b
    Examples:
      persisting serve --address 10.0.0.5:7000 -s /data/queues
      persisting serve --address 10.0.0.6:7000 --seed 10.0.0.5:7000 --metrics-port 9464
      persisting serve --address 10.0.0.7:7000 -s s3://bucket/prefix
    """
    from persisting.cluster import NodeOptions

    if passphrase is not None and passphrase_file is not None:
        raise click.UsageError("Pass either --passphrase or --passphrase-file, not both.")
    if passphrase_file is not None:
        passphrase = Path(passphrase_file).read_text().partition("\n")[0].strip()
        if not passphrase:
            raise click.UsageError(f"The first line of {passphrase_file} is empty.")
    options = NodeOptions(
        storage=storage,
        address=address,
        seeds=seeds,
        passphrase=passphrase,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        join_seconds=join_timeout,
    )
    topics_access.run(_serve(options, health_interval))


async def _serve(options: NodeOptions, health_interval: float) -> None:
    """Run a node until a signal arrives; Ctrl-C raises KeyboardInterrupt after a clean stop."""
    import asyncio
    import signal

    from persisting.cluster.node import StorageNode

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    starting = asyncio.ensure_future(StorageNode.start(options))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()  # a signal arrived while it waits for a seed
    try:
        node = await starting
    except asyncio.CancelledError:
        node = None
    if node is not None:
        background = [asyncio.create_task(_feed_watchdog())]
        if health_interval:
            background.append(asyncio.create_task(_print_health(node, health_interval)))
        try:
            output.line(_ready_line(node, options))
            _notify("READY=1")
            await stop.wait()
        finally:
            for task in background:
                task.cancel()
            _notify("STOPPING=1")
            await node.close()
            output.line(f"closed node {node.node}: its buckets are flushed and free")
    if signal.SIGINT in received:
        raise KeyboardInterrupt


def _ready_line(node: StorageNode, options: NodeOptions) -> str:
    line = f"serving {node.address} node {node.node} storage {node.storage}"
    if node.metrics_port is not None:
        line += f" metrics http://{options.metrics_host}:{node.metrics_port}/metrics"
    return line


async def _print_health(node: StorageNode, interval: float) -> None:
    import asyncio

    while True:
        await asyncio.sleep(interval)
        health = await node.health()
        nodes = output.plural(health.hosts, "storage node")
        buckets = output.plural(health.buckets, "bucket")
        topics = output.plural(health.topics, "topic")
        line = f"healthy: {nodes} in the cluster, {buckets} of {topics} here"
        output.line(line)
        _notify(f"STATUS={line}")


async def _feed_watchdog() -> None:
    """Tell systemd twice per watchdog interval that the event loop runs."""
    import asyncio

    with suppress(ValueError):
        seconds = int(os.environ.get("WATCHDOG_USEC", "")) / 1e6
        while True:
            _notify("WATCHDOG=1")
            await asyncio.sleep(seconds / 2)


def _notify(state: str) -> None:
    """Send a state to systemd, if it started this process and asked for it."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    target: Any = "\0" + path[1:] if path.startswith("@") else path
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifying:
        notifying.sendto(state.encode(), target)
