"""The options of the console."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from persisting.errors import InvalidArgument
from persisting.store_address import is_store_address

_MIN_TOKEN = 16


@dataclass(frozen=True)
class ConsoleOptions:
    """How the console is served."""

    storage: str
    """A folder, or a prefix in an object store."""
    host: str = "127.0.0.1"
    port: int = 7077
    token: str | None = None
    """What a browser must know; required unless the host is a loopback address."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names under which browsers reach the console."""
    allow_changes: bool = False
    backups: Path | None = None
    """Folder for backups; None: the console creates none."""
    prometheus: str | None = None
    """Address of a Prometheus page to link to."""
    query_seconds: float = 30.0
    """A query that takes longer is stopped."""
    query_memory: int = 2 << 30
    """A query that allocates more bytes is stopped."""
    sample_seconds: float | None = None
    """None: 5 seconds; 30 for an object store, where each sample costs requests."""
    seeds: tuple[str, ...] = ()
    """Nodes of a cluster to join, so that its owners can be asked."""
    cluster_address: str = "127.0.0.1:0"
    """Address at which the nodes of the cluster reach the console."""
    passphrase: str | None = None
    """Of the cluster."""
    join_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.is_loopback and not self.token:
            raise InvalidArgument(f"host {self.host!r} is not a loopback address and needs a token")
        if self.token is not None and len(self.token) < _MIN_TOKEN:
            raise InvalidArgument(
                f"the token must have at least {_MIN_TOKEN} characters; without --token a new one "
                "is generated"
            )
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise InvalidArgument("the token must consist of printable ASCII characters")
        if self.backups is not None and self._has(self.backups):
            raise InvalidArgument(
                f"backups cannot go into the storage folder: {self.backups} is in {self.storage}, "
                "where backups would be listed as topics; choose another folder"
            )
        if self.seeds and is_store_address(self.storage):
            raise InvalidArgument(
                "a console of topics in an object store needs no seeds: whatever is acknowledged "
                "is in the store"
            )
        if self.prometheus is not None and not self.prometheus.startswith(("http://", "https://")):
            raise InvalidArgument(
                f"the address of Prometheus must begin with http:// or https://, got "
                f"{self.prometheus!r}"
            )

    def _has(self, path: Path) -> bool:
        """Return whether a path is in the storage folder."""
        if is_store_address(self.storage):
            return False
        return path.resolve().is_relative_to(Path(self.storage).resolve())

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
