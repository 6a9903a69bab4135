"""Maintenance that takes a while: it runs beside the requests, and pages show its progress."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from persisting.errors import InvalidArgument, StorageError

_KEPT = 100
_MAX_RUNNING = 4


@dataclass
class Task:
    """One run of maintenance."""

    number: int
    topic: str
    kind: str
    started: float = field(default_factory=time.time)
    finished: float | None = None
    done_bytes: int = 0
    """Bytes that were copied; zero if the kind does not count them."""
    state: str = "running"
    """running, done, failed or stopped."""
    message: str = ""
    result: Any = None
    can_stop: bool = False
    runner: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        return (self.finished or time.time()) - self.started


class Tasks:
    """The maintenance that this console has started."""

    def __init__(self) -> None:
        self._tasks: dict[int, Task] = {}
        self._numbers = itertools.count(1)

    def of(self, topic: str) -> list[Task]:
        """Return the tasks of a topic, newest first."""
        return [task for task in reversed(self._tasks.values()) if task.topic == topic]

    def find(self, topic: str, number: int) -> Task:
        task = self._tasks.get(number)
        if task is None or task.topic != topic:
            raise InvalidArgument(f"topic {topic!r} has no task {number}")
        return task

    def start(
        self,
        topic: str,
        kind: str,
        work: Callable[[Task], Awaitable[Any]],
        *,
        can_stop: bool = False,
    ) -> Task:
        """Start maintenance of a topic; raise if it is already running."""
        running = [task for task in self._tasks.values() if task.state == "running"]
        if any(task.topic == topic and task.kind == kind for task in running):
            raise InvalidArgument(f"{kind} of {topic!r} is already running")
        if len(running) >= _MAX_RUNNING:
            raise InvalidArgument(f"{_MAX_RUNNING} tasks are running; wait until one has finished")
        task = Task(next(self._numbers), topic, kind, can_stop=can_stop)
        self._tasks[task.number] = task
        finished = [number for number, old in self._tasks.items() if old.state != "running"]
        for number in finished[: max(0, len(self._tasks) - _KEPT)]:
            del self._tasks[number]
        task.runner = asyncio.create_task(self._run(task, work))
        return task

    def stop(self, topic: str, number: int) -> None:
        """Stop a task that can be stopped."""
        task = self.find(topic, number)
        if not task.can_stop:
            raise InvalidArgument(f"{task.kind} cannot be stopped; it finishes by itself")
        if task.runner is not None:
            task.runner.cancel()

    async def close(self) -> None:
        """Stop what can be stopped, and wait for the rest."""
        running = [task for task in self._tasks.values() if task.state == "running"]
        for task in running:
            if task.can_stop and task.runner is not None:
                task.runner.cancel()
        await asyncio.gather(
            *(task.runner for task in running if task.runner is not None), return_exceptions=True
        )

    async def _run(self, task: Task, work: Callable[[Task], Awaitable[Any]]) -> None:
        try:
            task.result = await work(task)
            task.state = "done"
        except asyncio.CancelledError:
            task.state = "stopped"
        except (StorageError, OSError) as exc:
            task.state, task.message = "failed", str(exc)
        except Exception as exc:
            task.state, task.message = "failed", f"{type(exc).__name__}: {exc}"
        finally:
            task.finished = time.time()
