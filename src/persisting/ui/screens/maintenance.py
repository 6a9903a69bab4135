"""Maintenance: verify, compact, retain, back up; and the progress of Spark pipelines."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from persisting.actions.retention_plan import retention_plan
from persisting.actions.text_values import parse_duration, parse_size
from persisting.actions.verification import Verified
from persisting.concurrency.pool import in_thread
from persisting.errors import InvalidArgument
from persisting.topic import backup
from persisting.ui import pages
from persisting.ui.console import Console, topic_of
from persisting.ui.pipelines import pipelines_into
from persisting.ui.queries import VerifyQuery
from persisting.ui.requests import Parameters, path_number
from persisting.ui.tasks import Task

_VERIFY_SECONDS = 24 * 3600.0


async def show(request: Request) -> Response:
    """Show what can be done, what runs, and what was done."""
    console, topic = Console.of(request), topic_of(request)
    pipelines = await console.view.read(topic, pipelines_into)
    tasks = console.tasks.of(topic)
    return pages.render(
        request,
        "maintenance.html",
        topic=topic,
        tasks=tasks,
        running=any(task.state == "running" for task in tasks),
        pipelines=pipelines,
    )


async def preview_retention(request: Request) -> Response:
    """Show what a retention would drop."""
    console, topic = Console.of(request), topic_of(request)
    console.check_changes_allowed()
    given = Parameters.of(request)
    limits = _limits(given)
    plan = await console.view.read(topic, lambda source: retention_plan(source, *limits))
    return pages.render(
        request,
        "retain.html",
        topic=topic,
        plan=plan,
        fields={name: given.text(name) for name in ("rows", "bytes", "age") if given.text(name)},
    )


def _limits(given: Parameters) -> tuple[int | None, int | None, float | None]:
    rows = given.optional_number("rows", least=1)
    try:
        size, age = given.text("bytes"), given.text("age")
        limits = (
            rows,
            None if size is None else parse_size(size),
            None if age is None else parse_duration(age),
        )
    except ValueError as exc:
        raise InvalidArgument(str(exc)) from exc
    if limits == (None, None, None):
        raise InvalidArgument("set at least one limit: rows, size or age")
    return limits


async def start(request: Request) -> Response:
    """Start verify, compact, retain or backup."""
    console, topic, kind = Console.of(request), topic_of(request), request.path_params["kind"]
    if kind != "verify":
        console.check_changes_allowed()
    await in_thread(console.view.check, topic)
    given = await Parameters.of_form(request)
    work: Callable[[Task], Awaitable[Any]]
    if kind == "verify":  # it only reads

        async def work(task: Task) -> Any:
            query = VerifyQuery(console.view.place, topic)
            return await console.queries.run(query, Verified, _VERIFY_SECONDS)

    elif kind == "compact":

        async def work(task: Task) -> Any:
            async with await console.owners.open(topic) as reader:
                done = await reader.compact()
            await console.refresh(topic)
            return done

    elif kind == "retain":
        rows, size, age = _limits(given)

        async def work(task: Task) -> Any:
            async with await console.owners.open(topic) as reader:
                done = await reader.retain(rows=rows, bytes=size, seconds=age)
            await console.refresh(topic)
            return done

    elif kind == "backup":
        work = _backup(console, topic)
    else:
        raise InvalidArgument(f"there is no maintenance {kind!r}")
    console.tasks.start(topic, kind, work, can_stop=kind == "verify")
    return RedirectResponse(_page(topic), status_code=303)


def _backup(console: Console, topic: str) -> Callable[[Task], Awaitable[Any]]:
    folder = console.options.backups
    if folder is None:
        raise InvalidArgument("start the console with --backups DIR to say where backups go")
    now = dt.datetime.now(dt.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    target = folder / f"{topic}-{now}"

    async def work(task: Task) -> Any:
        def count(nbytes: int) -> None:
            task.done_bytes += nbytes

        def copy() -> backup.Backup:
            os.makedirs(target.parent, exist_ok=True)
            return backup.create(console.view.open(topic), target, count)

        # The thread cannot be stopped, so its result is awaited whatever happens to the task.
        done = await asyncio.shield(in_thread(copy))
        return {"path": str(target), "files": len(done.files), "bytes": done.bytes}

    return work


async def stop(request: Request) -> Response:
    """Stop a task."""
    topic = topic_of(request)
    Console.of(request).tasks.stop(topic, path_number(request, "number"))
    return RedirectResponse(_page(topic), status_code=303)


def _page(topic: str) -> str:
    return f"/topics/{pages.segment(topic)}/maintenance"
