"""Opening topics, asking, and showing how far long work has come."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from persisting.cli import output

if TYPE_CHECKING:
    from persisting.queue import QueueReader
    from persisting.topic.topic_files import TopicFolder

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run async work to its end."""
    return asyncio.run(work)


def debugging() -> bool:
    """Whether errors are to be shown with all that led to them."""
    return bool(click.get_current_context().find_root().obj)


def stored(topic: str, storage: str) -> TopicFolder:
    """A topic on disk, to look at: neither locked nor recovered."""
    from persisting.topic.inspect import find

    return find(topic, storage)


def folder_of(topic: str, storage: str) -> Path:
    """The folder that a topic has or would have."""
    from persisting.topic import inspect

    return inspect.folder_of(topic, storage)


def buckets(source: TopicFolder, chosen: int | None) -> list[int]:
    """The chosen bucket of a topic, or all."""
    if chosen is None:
        return list(source.buckets)
    if chosen not in source.buckets:
        raise click.UsageError(
            f"There is no bucket {chosen}; the topic has 0 to {len(source.buckets) - 1}."
        )
    return [chosen]


def columns(source: TopicFolder, chosen: list[str] | None) -> list[str]:
    """The chosen fields of a topic, or all."""
    names: list[str] = source.schema().names
    for name in chosen or []:
        if name not in names:
            raise click.UsageError(
                f"There is no field {name!r}; there are: {', '.join(names) or 'none yet'}."
            )
    return names if chosen is None else chosen


def readable(topic: str, storage: str) -> TopicFolder:
    """The same with what a crashed owner left in its log brought into the table."""
    found = stored(topic, storage)
    found.recover()
    return found


def tell_of_owner(source: TopicFolder) -> None:
    """Say that the topic is being written, if there may be records that only its owner can show."""
    from persisting.lock import owner_of
    from persisting.topic.spec import bucket_folder
    from persisting.wal import FOLDER as LOG

    owner, pending = None, 0
    for bucket in source.buckets:
        folder = bucket_folder(source.folder, bucket)
        found = owner_of(folder)
        if found is not None and not found.get("passing"):
            owner = found
            for segment in (folder / LOG).glob("*"):
                with suppress(FileNotFoundError):  # its owner has just released it
                    pending += segment.stat().st_size
    logged = bool(source.config.options.get("enable_wal"))
    if owner is None or (logged and not pending):
        return
    rest = f"{output.size(pending)} of its log" if logged else "what it has not flushed"
    output.say(
        f"note: process {owner.get('pid')} on {owner.get('host')} has the topic open; {rest} will "
        "come into the table, and is not in this yet"
    )


@asynccontextmanager
async def reader(topic: str, storage: str, bucket: int | None = None) -> AsyncIterator[QueueReader]:
    """A reader of a topic on disk."""
    from persisting.queue import read_queue

    folder = stored(topic, storage).folder
    opened = await read_queue(topic=folder.name, storage_path=str(folder.parent), bucket_id=bucket)
    async with opened:
        yield opened


def confirm(question: str, yes: bool) -> None:
    """Go on only if a person agrees; where nobody can be asked, ``--yes`` is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Say --yes, since nobody can be asked here.")
    click.confirm(question, abort=True, err=True)


class Progress:
    """How far work has come; shown on a terminal only."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar, self._task = bar, task
        self.done = 0

    def advance(self, count: int) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.advance(self._task, count)


@contextmanager
def progress(
    what: str, total: int | None = None, *, quiet: bool = False, unit: str = "records"
) -> Iterator[Progress]:
    """A bar with rate and time left, beside the output."""
    if quiet or not output.err().is_terminal:
        yield Progress()
        return
    from rich import progress as rich

    columns: list[Any] = [rich.TextColumn("{task.description}"), rich.BarColumn()]
    if unit == "bytes":
        columns += [rich.DownloadColumn(), rich.TransferSpeedColumn()]
    else:
        columns += [rich.MofNCompleteColumn() if total is not None else _count(), _rate()]
    columns += [rich.TimeRemainingColumn() if total is not None else rich.TimeElapsedColumn()]
    with rich.Progress(*columns, console=output.err(), transient=True) as bar:
        yield Progress(bar, bar.add_task(what, total=total))


def _column(render: Any) -> Any:
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Column(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(render(task))

    return Column()


def _count() -> Any:
    return _column(lambda task: f"{int(task.completed):,}")


def _rate() -> Any:
    return _column(lambda task: f"{task.speed:,.0f}/s" if task.speed else "")
