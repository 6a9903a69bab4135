"""A client of a cluster whose topic is in an object store, as a process of its own.

``write`` puts numbered records from several writers until SIGTERM, repeating what failed under the
same number, and prints ``ACK <writer> <number>`` and ``ERR <message>``. ``read`` prints ``BUCKET``
with the writers and numbers of each bucket, in order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from typing import Any

BUCKETS = 6
WRITERS = 6
ONCE = "once"
"""The writer without an id, which never repeats a put."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["write", "read"])
    parser.add_argument("--address", required=True)
    parser.add_argument("--seeds", nargs="+", required=True)
    parser.add_argument("--passphrase", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--lease", type=float, required=True)
    return parser.parse_args()


async def write(system: Any, options: argparse.Namespace) -> None:
    from persisting.errors import StorageError
    from persisting.queue import write_queue

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def opened(name: str | None) -> Any:
        return await write_queue(
            system,
            topic="t",
            storage_path=options.url,
            durable=True,
            num_buckets=BUCKETS,
            backend_options={"lease": options.lease, "flush_interval": 0.5},
            writer_id=name,
        )

    async def produce(name: str) -> None:
        writer, number = await opened(None if name == ONCE else name), 0
        while not stop.is_set():
            records = [
                {"id": f"{name}-{number}-{k}", "w": name, "n": 3 * number + k} for k in range(3)
            ]
            try:
                await writer.put(records, **({} if name == ONCE else {"sequence": number}))
                print("ACK", name, number, flush=True)
            except StorageError as exc:
                print("ERR", name, number, type(exc).__name__, exc, flush=True)
                await asyncio.sleep(0.2)
                if name != ONCE:
                    continue
            number += 1
            await asyncio.sleep(0.02)

    await asyncio.gather(*(produce(name) for name in (ONCE, *map(str, range(WRITERS)))))
    print("DONE", flush=True)


async def read(system: Any, options: argparse.Namespace) -> None:
    from persisting.queue import read_queue

    for bucket in range(BUCKETS):
        reader = await read_queue(system, topic="t", storage_path=options.url, bucket_id=bucket)
        found = [[record["w"], record["n"]] async for record in reader.get_stream()]
        print("BUCKET", bucket, json.dumps(found), flush=True)
        await reader.close()
    print("DONE", flush=True)


async def main() -> None:
    import pulsing as pul

    from persisting.cluster.pulsing_transport import PulsingTransport
    from support.waiting import until

    options = arguments()
    system = await pul.actor_system(
        options.address, seeds=options.seeds, passphrase=options.passphrase
    )
    await until(PulsingTransport(system).hosts)
    await {"write": write, "read": read}[options.mode](system, options)
    await system.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
