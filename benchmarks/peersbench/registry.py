"""All systems that can be measured, by their name on the command line."""

from __future__ import annotations

from collections.abc import Collection

from peersbench import (
    disk_floor,
    first_release,
    jetstream_store,
    lance_stores,
    persisting_store,
    redis_store,
    rocksdb_store,
    sqlite_store,
    topic_store,
)
from peersbench.peer import Peer
from peersbench.workload import CROWD, INGEST, SINGLES

PEERS: dict[str, tuple[Peer, ...]] = {
    "disk": (disk_floor.PEER,),
    "sqlite": (sqlite_store.PEER,),
    "topics": topic_store.PEERS,
    "backends": persisting_store.PEERS,
    "rocksdb": (rocksdb_store.PEER,),
    "redis": (redis_store.PEER,),
    "jetstream": (jetstream_store.PEER,),
    "lance": (lance_stores.LANCE,),
    "lancedb": (lance_stores.LANCEDB,),
    "first": (first_release.PEER,),
}

YARDSTICK = sqlite_store.PEER.name

TARGETS = {
    # The targets of issues 9 and 18 for small records: (workload, ours, compared with): minimum
    # ratio. The bare backends must stay as fast as in 0.4.0.
    (INGEST, topic_store.FOUR.name, YARDSTICK): 1.2,
    (INGEST, topic_store.SIXTEEN.name, YARDSTICK): 1.0,
    (INGEST, topic_store.FOUR.name, persisting_store.SYNCED.name): 0.7,
    (SINGLES, topic_store.FOUR.name, YARDSTICK): 0.8,
    (SINGLES, topic_store.BLOCKING.name, YARDSTICK): 1.0,
    (CROWD, topic_store.FOUR.name, YARDSTICK): 6.0,
    (CROWD, topic_store.FOUR.name, topic_store.ONE.name): 0.9,
    (INGEST, persisting_store.SYNCED.name, YARDSTICK): 1.7,
    (INGEST, persisting_store.DEFAULT.name, YARDSTICK): 2.3,
    (SINGLES, persisting_store.SYNCED.name, YARDSTICK): 0.4,
    (CROWD, persisting_store.SYNCED.name, YARDSTICK): 6.0,
    (CROWD, persisting_store.SYNCED.name, jetstream_store.PEER.name): 3.0,
}


def chosen(names: Collection[str]) -> list[Peer]:
    """Return the installed systems; print why the others are left out."""
    installed = []
    for name in PEERS:
        for peer in PEERS[name] if name in names else ():
            missing = peer.missing()
            if missing is None:
                installed.append(peer)
            else:
                print(f"skipping {peer.name}: {missing}")
    return installed
