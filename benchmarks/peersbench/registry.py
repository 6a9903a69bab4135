"""Everyone who can be measured, under the name that the command line knows."""

from __future__ import annotations

from peersbench import first, jetstream, lances, ours, redis_streams, rocks, sqlite
from peersbench.peer import Peer
from peersbench.work import CROWD, INGEST, SINGLES

PEERS: dict[str, tuple[Peer, ...]] = {
    "ours": (ours.SYNCED, ours.DEFAULT, ours.UNLOGGED),
    "sqlite": (sqlite.PEER,),
    "rocksdb": (rocks.PEER,),
    "redis": (redis_streams.PEER,),
    "jetstream": (jetstream.PEER,),
    "lance": (lances.LANCE,),
    "lancedb": (lances.LANCEDB,),
    "first": (first.PEER,),
}

YARDSTICK = sqlite.PEER.name

TARGETS = {
    # The targets of issue 9, of the small records: work, ours, beside whom, at least.
    (INGEST, ours.SYNCED.name, YARDSTICK): 2.0,
    (INGEST, ours.DEFAULT.name, YARDSTICK): 3.0,
    (SINGLES, ours.SYNCED.name, YARDSTICK): 0.4,
    (CROWD, ours.SYNCED.name, YARDSTICK): 6.0,
    (CROWD, ours.SYNCED.name, jetstream.PEER.name): 3.0,
}


def chosen(names: list[str] | None) -> list[Peer]:
    """Those who are here; of those who are not it is printed why."""
    found = []
    for name in PEERS:
        for peer in PEERS[name] if names is None or name in names else ():
            missing = peer.missing()
            if missing is None:
                found.append(peer)
            else:
                print(f"without {peer.name}: {missing}")
    return found
