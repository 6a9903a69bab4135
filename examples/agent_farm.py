"""A farm of agents: processes that share tasks, with retries, a kill, dead letters, a re-drive.

    python examples/agent_farm.py [folder]

Three processes solve tasks of the topic "tasks" and put what they found into the topic "results".
Some tasks fail at first, one takes longer than its lease, and two fail until their site is up. One
agent is killed with ``kill -9``: the others get its tasks once the leases have ended.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from persisting.queue import read_queue, write_queue

TASKS = 60
LONG, FLAKY, BROKEN = {5}, {12, 24, 36, 48}, {17, 41}
AGENTS, LEASE = 3, 2.0


class ToolError(Exception):
    """A tool of an agent has failed."""


async def open_reader(folder: str) -> Any:
    return await read_queue(
        topic="tasks",
        storage_path=folder,
        group="agents",
        mode="work",
        lease=LEASE,
        max_deliveries=8,
    )


async def agent(folder: str) -> None:
    """Solve tasks until the process ends."""
    results = await write_queue(topic="results", storage_path=folder, durable=True)
    tried: set[int] = set()

    async def solve(task: dict[str, Any]) -> None:
        number = task["id"]
        if number in LONG:
            await asyncio.sleep(1.5 * LEASE)  # run() renews the lease meanwhile
        if number in FLAKY and number not in tried:
            tried.add(number)
            raise ToolError("the browser crashed")
        if number in BROKEN and not (Path(folder) / "site-is-up").exists():
            raise ToolError("the site is down")
        await asyncio.sleep(0.05)
        # A task may be solved twice, if its agent is killed between the put and the ack.
        await results.put({"id": number, "answer": number * number})

    reader = await open_reader(folder)
    await reader.run(solve, concurrency=4, backoff=0.05, max_backoff=0.5)


async def all_finished(reader: Any) -> None:
    """Wait until every task is solved or given up."""
    while (await reader.stats())["unacknowledged"]:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def report(reader: Any, folder: str) -> None:
    """Print how many tasks are solved, and why the others are not."""
    async with await read_queue(topic="results", storage_path=folder) as results:
        solved = {record["id"]: record["answer"] for record in await results.get(limit=None)}
    assert all(answer == number * number for number, answer in solved.items())
    letters = await reader.dead_letters()
    print(f"solved: {len(solved)}, given up: {len(letters)}")
    for letter in sorted(letters, key=lambda letter: int(letter["id"])):
        why = letter["dead_letter"]
        print(f"  task {letter['id']}: {why['reason']}, after {why['attempts']} attempts")


async def main(folder: str) -> None:
    async with await write_queue(topic="tasks", storage_path=folder, durable=True) as tasks:
        await tasks.put([{"id": number} for number in range(TASKS)])
    print("tasks:", TASKS)

    program = [sys.executable, __file__, "--agent", folder]
    agents = [await asyncio.create_subprocess_exec(*program) for _ in range(AGENTS)]
    reader = await open_reader(folder)
    try:
        while (await reader.stats())["acknowledged"] < TASKS // 4:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        agents[0].kill()
        print("an agent was killed")
        await all_finished(reader)
        await report(reader, folder)

        (Path(folder) / "site-is-up").touch()
        count = await reader.redrive("dead_letter.reason LIKE '%site is down%'")
        print("delivered again:", count)
        await all_finished(reader)
        await report(reader, folder)
    finally:
        for process in agents:
            if process.returncode is None:
                process.terminate()
            await process.wait()
        await reader.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--agent"]:
        asyncio.run(agent(sys.argv[2]))
    elif len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as place:
            asyncio.run(main(place))
