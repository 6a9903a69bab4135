"""Topics on a cluster: every bucket is owned by one node, which answers the calls of the others.

The owning side: ``host`` the buckets of a node · ``owned_topic`` those of one topic, and puts to
several of them · ``service`` the requests one bucket answers · ``page_size`` how much it reads for
a page · ``staged_uploads`` puts of several messages · ``numbered_puts`` puts that are carried out,
and those that their senders gave up · ``store_host`` topics in object stores · ``work_host`` the
work groups that a node keeps · ``node`` a process that is nothing but a storage node.

The calling side: ``open_remote`` opens writers and readers · ``cluster_reader`` a member that never
owns a bucket · ``cluster_topic`` topics on a cluster · ``client`` topics and buckets wherever they
are, made of ``locator`` and ``node_locator`` (who owns a bucket), ``put_pipeline`` (the order of
puts, messages that share an owner), ``put_delivery`` (calls to owners, retries) and ``watcher``
(waiting) · ``pulse`` whether a node still answers · ``remote_groups`` members of work groups.

Between them: ``placement`` which node should own what · ``store_access`` credentials of object
stores · ``wire`` requests and replies as bytes · ``transport`` what is needed of a network ·
``pulsing_transport``, ``pulsing_messages`` and ``actor`` the same by Pulsing, the only modules that
import it · ``tcp_nodelay``, ``interpreter_exit`` its workarounds.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from persisting.errors import StorageError

_LAZY = {
    "ClusterReader": "cluster_reader",
    "NodeHealth": "node",
    "NodeOptions": "node",
    "StorageNode": "node",
    "serve": "host",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        try:
            import persisting.cluster.pulsing_transport  # noqa: F401 (fail at the import)

            return getattr(import_module(f"persisting.cluster.{_LAZY[name]}"), name)
        except ModuleNotFoundError as exc:
            if exc.name != "pulsing":
                raise
            raise StorageError(
                f"Pulsing is not installed ({exc}): pip install 'persisting[pulsing]'"
            ) from exc
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
