"""Topics shared by processes whose event loops are uvloop's, as a web server's often are."""

from __future__ import annotations

from pathlib import Path

from support.children import python, wait_for_line

OWNER = """
import asyncio, sys, uvloop
from persisting.queue import write_queue

asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

async def main():
    writer = await write_queue("shared", storage_path=sys.argv[1], backend="lance", num_buckets=2)
    await writer.put([{"id": n, "text": ""} for n in range(10)])
    print("open", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
CALLER = """
import asyncio, sys, uvloop
from persisting.queue import read_queue, write_queue

asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

async def main():
    async with await write_queue("shared", storage_path=sys.argv[1]) as writer:
        for n in range(10, 20):
            await writer.put({"id": n, "text": ""})
        await writer.put([{"id": n, "text": "x" * 1000} for n in range(20, 5000)])
    async with await read_queue("shared", storage_path=sys.argv[1]) as reader:
        print(len(await reader.get(None)), flush=True)

asyncio.run(main())
"""


def test_processes_with_uvloop_share_a_topic(tmp_path: Path) -> None:
    with python(OWNER, tmp_path) as owner:
        wait_for_line(owner)
        with python(CALLER, tmp_path) as caller:
            assert wait_for_line(caller).strip() == "5000"
