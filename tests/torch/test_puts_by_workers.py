"""Workers of a torch DataLoader that put to a topic which their parent owns."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from persisting.queue import read_queue

ITEMS = 60
PROGRAM = f"""
import asyncio, sys, warnings
from torch.utils.data import DataLoader, Dataset, get_worker_info
from persisting.queue import write_queue

warnings.simplefilter("ignore")
place = {{"topic": "scores", "storage_path": sys.argv[1]}}

class Scored(Dataset):
    '''Puts the score of an item while the item is loaded.'''

    def __len__(self):
        return {ITEMS}

    def __getitem__(self, number):
        asyncio.run(self.put(number))
        return number

    async def put(self, number):
        async with await write_queue(**place) as writer:
            await writer.put({{"id": number, "worker": get_worker_info().id}})

async def main():
    options = {{"enable_wal": True, "wal_sync_interval": 0.0}}
    async with await write_queue(
        **place, backend="persisting", num_buckets=2, backend_options=options
    ) as writer:
        await writer.put({{"id": -1, "worker": -1}})
        loader = DataLoader(
            Scored(), batch_size=10, num_workers=2, multiprocessing_context=sys.argv[2]
        )
        # Blocks the event loop: the workers must not need it.
        assert sum(len(batch) for batch in loader) == {ITEMS}
        assert (await writer.stats())["total_count"] == {ITEMS} + 1

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_workers_of_a_loader_put_to_the_topic_of_their_parent(
    tmp_path: Path, method: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(tmp_path), method]
    await asyncio.to_thread(subprocess.run, command, check=True)
    async with await read_queue(topic="scores", storage_path=str(tmp_path)) as reader:
        records = await reader.get(None)
    assert sorted(record["id"] for record in records) == [-1, *range(ITEMS)]
    assert {record["worker"] for record in records} == {-1, 0, 1}
