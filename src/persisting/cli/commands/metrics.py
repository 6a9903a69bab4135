"""``metrics serve``: exports topics to Prometheus."""

from __future__ import annotations

import signal
import threading

import click

from persisting.cli import output, parameters
from persisting.cli.command_group import CommandGroup


@click.group(cls=CommandGroup)
def metrics() -> None:
    """Export the state of topics to Prometheus.

    \b
    Example:
      persisting metrics serve --port 9464
    """


@metrics.command()
@click.option(
    "--port",
    default=9464,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 takes a free port.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@parameters.storage
def serve(port: int, host: str, storage: str) -> None:
    """Serve rows, sizes, owners and lag of every topic at /metrics until Ctrl-C.

    Reads the files at every scrape and does not disturb owners. An owner with enable_metrics
    exports what only it knows, such as flush times and buffers.

    \b
    Examples:
      persisting metrics serve -s /data/queues
      curl -s localhost:9464/metrics | grep lag
    """
    from persisting.cli.metrics_exporter import serve as start
    from persisting.topic.inspect import topics_in

    topics_in(storage)
    server = start(storage, port, host)
    output.say(
        f"serving http://{host}:{server.server_port}/metrics of {storage}; press Ctrl-C to stop"
    )
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    try:
        terminated.wait()
    finally:
        server.shutdown()
        server.server_close()
