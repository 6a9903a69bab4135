"""All systems that can be measured, by their name on the command line."""

from __future__ import annotations

from peersbench import (
    first_release,
    jetstream_store,
    lance_stores,
    persisting_store,
    redis_store,
    rocksdb_store,
    sqlite_store,
)
from peersbench.peer import Peer
from peersbench.workload import CROWD, INGEST, SINGLES

PEERS: dict[str, tuple[Peer, ...]] = {
    "ours": (persisting_store.SYNCED, persisting_store.DEFAULT, persisting_store.UNLOGGED),
    "sqlite": (sqlite_store.PEER,),
    "rocksdb": (rocksdb_store.PEER,),
    "redis": (redis_store.PEER,),
    "jetstream": (jetstream_store.PEER,),
    "lance": (lance_stores.LANCE,),
    "lancedb": (lance_stores.LANCEDB,),
    "first": (first_release.PEER,),
}

YARDSTICK = sqlite_store.PEER.name

TARGETS = {
    # The targets of issue 9 for small records: (workload, ours, compared with): minimum ratio.
    (INGEST, persisting_store.SYNCED.name, YARDSTICK): 2.0,
    (INGEST, persisting_store.DEFAULT.name, YARDSTICK): 3.0,
    (SINGLES, persisting_store.SYNCED.name, YARDSTICK): 0.4,
    (CROWD, persisting_store.SYNCED.name, YARDSTICK): 6.0,
    (CROWD, persisting_store.SYNCED.name, jetstream_store.PEER.name): 3.0,
}


def chosen(names: list[str] | None) -> list[Peer]:
    """Return the installed systems; print why the others are left out."""
    installed = []
    for name in PEERS:
        for peer in PEERS[name] if names is None or name in names else ():
            missing = peer.missing()
            if missing is None:
                installed.append(peer)
            else:
                print(f"skipping {peer.name}: {missing}")
    return installed
