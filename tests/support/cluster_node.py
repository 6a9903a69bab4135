"""One node of a test's cluster: it owns buckets until SIGTERM, and ends by itself.

Prints ``READY <address> <node id>``. Ends when its parent has gone or after ``LIFE`` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal

LIFE = 600.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", nargs="*", default=[])
    parser.add_argument("--passphrase")
    parser.add_argument("--idle", action="store_true", help="join, but own no buckets")
    return parser.parse_args()


async def main() -> None:
    import pulsing as pul

    from persisting.cluster.host import serve
    from persisting.queue import register_backend
    from support.protocol_only_backend import OnlyProtocol

    given = arguments()
    register_backend("custom", OnlyProtocol)
    system = await pul.actor_system(
        "127.0.0.1:0", seeds=given.seeds or None, passphrase=given.passphrase
    )
    host = None if given.idle else await serve(system)
    done = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
    print("READY", system.addr, system.node_id.id, flush=True)
    parent = os.getppid()
    for _ in range(int(LIFE)):
        try:
            await asyncio.wait_for(done.wait(), 1.0)
            break
        except asyncio.TimeoutError:
            if os.getppid() != parent:
                break
    if host is not None:
        await host.close()
    await system.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
