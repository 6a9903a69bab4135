"""``ui``: serves the console."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from persisting.cli import output, parameters
from persisting.cli.parameters import LocalPath, Size

if TYPE_CHECKING:
    from persisting.ui.options import ConsoleOptions

_MODULES = ("jinja2", "starlette", "uvicorn")


@click.command()
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address of this machine to listen on. Any other than a loopback address needs a token, "
    "and the connection is not encrypted.",
)
@click.option(
    "--port",
    "-p",
    type=click.IntRange(0, 65535),
    default=7077,
    show_default=True,
    help="Port to listen on; 0 takes a free port.",
)
@click.option(
    "--token",
    envvar="PERSISTING_UI_TOKEN",
    show_envvar=True,
    help="Token that a browser must know.  [default: none on a loopback address, else a new one]",
)
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Also answer under this host name, as behind a proxy; may be repeated.",
)
@click.option(
    "--allow-changes",
    is_flag=True,
    help="Allow the console to tag, restore, compact, retain, back up and move groups.",
)
@click.option(
    "--backups", type=LocalPath(), metavar="DIR", help="Folder into which the console backs up."
)
@click.option("--prometheus", metavar="URL", help="Show a link to this page of Prometheus.")
@parameters.duration("--query-timeout", "30s", "Stop a search that takes longer.")
@click.option(
    "--query-memory",
    type=Size(),
    default="2G",
    show_default=True,
    help="Stop a search that allocates more memory.",
)
@click.option(
    "--seeds",
    metavar="HOST:PORT,…",
    help="Join the cluster of these nodes as a client, which owns nothing: show what its owners "
    "hold in memory, and make changes through them. Needs persisting[pulsing].",
)
@click.option(
    "--cluster-address",
    metavar="HOST:PORT",
    help="With --seeds: address at which the nodes reach the console; port 0 takes a free port.  "
    "[default: 127.0.0.1:0]",
)
@click.option(
    "--passphrase-file",
    type=click.Path(exists=True, dir_okay=False),
    help="With --seeds: file whose first line is the passphrase of the cluster.  [default: the "
    "environment variable PERSISTING_PASSPHRASE]",
)
@parameters.storage
def ui(
    host: str,
    port: int,
    token: str | None,
    allowed_hosts: tuple[str, ...],
    allow_changes: bool,
    backups: str | None,
    prometheus: str | None,
    query_timeout: float,
    query_memory: int,
    seeds: str | None,
    cluster_address: str | None,
    passphrase_file: str | None,
    storage: str,
) -> None:
    """Serve a web page that shows topics: records, live tail, search, trajectories, versions.

    It reads as the other commands do, without disturbing owners, and changes nothing unless
    --allow-changes is given. Prints its address, and serves until Ctrl-C. Needs persisting[ui].

    \b
    Examples:
      persisting ui -s /data/queues
      persisting ui -s /data/queues --allow-changes --backups /backups
      persisting ui -s s3://bucket/queues
      persisting ui -s /data/queues --host 0.0.0.0 --port 8080
      persisting ui -s /data/queues --seeds 10.0.0.5:7000 --cluster-address 10.0.0.9:0
    """
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"the console needs {', '.join(missing)}: pip install 'persisting[ui]'"
        )
    from persisting.options import storage_folder
    from persisting.store_address import is_store_address
    from persisting.ui.options import ConsoleOptions, is_loopback
    from persisting.ui.server import listen, run

    if is_store_address(storage):
        _check_store(storage)
    else:
        folder = storage_folder(storage)
        if not folder.is_dir():
            raise click.UsageError(f"There is no folder {folder}; pass the storage folder with -s.")
        storage = str(folder)
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(32)
    if seeds is None and (cluster_address is not None or passphrase_file is not None):
        raise click.UsageError("--cluster-address and --passphrase-file need --seeds.")
    if backups is not None and not allow_changes:
        raise click.UsageError("--backups needs --allow-changes.")
    if query_timeout <= 0:
        raise click.UsageError("--query-timeout must be more than 0.")
    if query_memory <= 0:
        raise click.UsageError("--query-memory must be more than 0.")
    options = ConsoleOptions(
        storage=storage,
        host=host,
        port=port,
        token=token,
        allowed_hosts=allowed_hosts,
        allow_changes=allow_changes,
        backups=None if backups is None else Path(backups).absolute(),
        prometheus=prometheus,
        query_seconds=query_timeout,
        query_memory=query_memory,
        seeds=tuple(seed.strip() for seed in (seeds or "").split(",") if seed.strip()),
        cluster_address=cluster_address or ConsoleOptions.cluster_address,
        passphrase=_passphrase(passphrase_file),
    )
    listening = listen(host, port)
    options = dataclasses.replace(options, port=listening.getsockname()[1])
    run(options, listening, lambda: _print_address(options))


def _check_store(storage: str) -> None:
    """Raise if the topics at an address cannot be listed: credentials are wrong, for example."""
    from persisting.topic.store_inspect import topic_names

    topic_names(storage)


def _passphrase(file: str | None) -> str | None:
    if file is None:
        return os.environ.get("PERSISTING_PASSPHRASE")
    passphrase = Path(file).read_text().partition("\n")[0].strip()
    if not passphrase:
        raise click.UsageError(f"The first line of {file} is empty.")
    return passphrase


def _print_address(options: ConsoleOptions) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{options.port}/"
    if options.token is not None:
        address += f"?token={quote(options.token, safe='')}"
    output.line(f"console {address}")
    if not options.is_loopback:
        output.say(
            "warning: other machines can reach the console, and the connection is not encrypted; "
            "use a tunnel, or a proxy with TLS, on networks that you do not trust"
        )
