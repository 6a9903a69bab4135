"""One node of a test's cluster: it owns buckets until SIGTERM.

Prints ``READY <address> <node id>``. It also exits when its parent has ended, and after
``MAX_SECONDS``, so that no test leaves it behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal

MAX_SECONDS = 600


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", nargs="*", default=[])
    parser.add_argument("--passphrase")
    parser.add_argument("--address", default="127.0.0.1:0")
    parser.add_argument("--storage", help="own topics in this place only")
    parser.add_argument("--idle", action="store_true", help="join without owning buckets")
    return parser.parse_args()


async def main() -> None:
    import pulsing as pul

    from persisting.cluster.host import serve
    from persisting.queue import register_backend
    from support.protocol_only_backend import OnlyProtocol

    options = arguments()
    register_backend("custom", OnlyProtocol)
    system = await pul.actor_system(
        options.address, seeds=options.seeds or None, passphrase=options.passphrase
    )
    host = None if options.idle else await serve(system, options.storage)
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    print("READY", system.addr, system.node_id.id, flush=True)
    parent = os.getppid()
    for _ in range(MAX_SECONDS):
        try:
            await asyncio.wait_for(terminated.wait(), 1.0)
            break
        except asyncio.TimeoutError:
            if os.getppid() != parent:
                break
    if host is not None:
        await host.close()
    await system.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
