"""``metrics serve``."""

from __future__ import annotations

import signal
import threading

import click

from persisting.cli import output, parameters


@click.group()
def metrics() -> None:
    """Tell Prometheus about the topics.

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
    help="0 takes a free one.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@parameters.storage
def serve(port: int, host: str, storage: str) -> None:
    """Serve /metrics: rows, sizes, owners and lag of every topic, until Ctrl-C.

    Looks at the files at every scrape and disturbs no owner. What only the owner knows (flush
    times, buffers) the owner exports itself, with enable_metrics.

    \b
    Examples:
      persisting metrics serve -s /data/queues
      curl -s localhost:9464/metrics | grep lag
    """
    from persisting.cli.metrics_exporter import serve as start
    from persisting.topic.inspect import topics_in

    topics_in(storage)
    server = start(storage, port, host)
    output.say(f"serving http://{host}:{server.server_port}/metrics of {storage}; Ctrl-C ends it")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        ended.wait()
    finally:
        server.shutdown()
        server.server_close()
