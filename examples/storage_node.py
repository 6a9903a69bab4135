"""A node of a Pulsing cluster that owns buckets until SIGTERM or Ctrl-C.

    python examples/storage_node.py                          # the first node; prints its address
    python examples/storage_node.py --seeds 127.0.0.1:7000   # another node

It listens on this machine only unless --address says otherwise. Across machines, use a trusted
network and a passphrase.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

import pulsing as pul

from persisting.cluster import serve


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="127.0.0.1:0")
    parser.add_argument("--seeds", nargs="*")
    parser.add_argument("--passphrase")
    given = parser.parse_args()

    system = await pul.actor_system(given.address, seeds=given.seeds, passphrase=given.passphrase)
    host = await serve(system)
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    print("serving", system.addr, host.node, flush=True)

    await stop.wait()
    await host.close()  # flushes every bucket; then other nodes may open them
    await system.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
