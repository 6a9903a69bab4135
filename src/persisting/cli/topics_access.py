"""Opens topics, asks for confirmation and shows progress."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from persisting import cli
from persisting.actions.text_values import format_size
from persisting.cli import output
from persisting.suggestions import choices

if TYPE_CHECKING:
    from persisting.queue import QueueReader
    from persisting.store.object_store import ObjectStore
    from persisting.topic.store_files import StoreTopic
    from persisting.topic.topic_files import TopicFolder

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine; Ctrl-C cancels it, lets it clean up and raises KeyboardInterrupt."""
    import asyncio

    return asyncio.run(work)


def debugging() -> bool:
    """Return whether errors are shown with their tracebacks."""
    return bool(click.get_current_context().find_root().obj)


IN_STORES = (
    ("topics",),
    ("describe",),
    ("head",),
    ("tail",),
    ("get",),
    ("query",),
    ("count",),
    ("search",),
    ("versions",),
    ("tag",),
    ("restore",),
    ("index", "create"),
    ("index", "list"),
    ("index", "drop"),
    ("compact",),
    ("retain",),
    ("verify",),
    ("create",),
    ("delete",),
    ("put",),
    ("import",),
    ("export",),
    ("groups",),
    ("work",),
    ("backup", "create"),
    ("backup", "restore"),
    ("backup", "verify"),
    ("wal", "inspect"),
    ("metrics", "serve"),
    ("pipeline",),
)
"""The commands, or groups of commands, that also take topics in an object store."""


def find_topic(topic: str, storage: str) -> TopicFolder:
    """Find a stored topic for reading, without locking or recovering it."""
    _load_arrow()
    from persisting.topic.inspect import find

    refuse_store(topic, storage)
    return find(topic, storage)


def refuse_store(topic: str, storage: str) -> None:
    """Raise if a topic is in an object store and the command works with folders only."""
    from persisting.store_address import is_store_address

    place = topic if is_store_address(topic) else storage
    _, *words = click.get_current_context().command_path.split()
    known = words[:1], words[:2]
    if is_store_address(place) and not any(tuple(name) in IN_STORES for name in known):
        raise click.UsageError(
            f"'persisting {' '.join(words)}' does not support topics in an object store yet "
            f"({place}); these commands do: {', '.join(map(' '.join, IN_STORES))}."
        )


def folder_of(topic: str, storage: str) -> Path:
    """Return the folder of a topic, which need not exist."""
    _load_arrow()
    from persisting.topic import inspect

    refuse_store(topic, storage)
    return inspect.folder_of(topic, storage)


class TopicPlace(NamedTuple):
    """Where a topic is, or would be: in a folder or in an object store."""

    name: str
    root: str
    """The ``storage_path`` of the topic."""
    place: Path | ObjectStore

    def __str__(self) -> str:
        return str(self.place) if isinstance(self.place, Path) else str(self.place.address)

    @property
    def exists(self) -> bool:
        """Whether the topic exists."""
        from persisting.topic import store_config
        from persisting.topic.spec import has_file

        if isinstance(self.place, Path):
            return has_file(self.place)
        return store_config.load(self.place) is not None


def place_of(topic: str, storage: str) -> TopicPlace:
    """Return the place of a topic, which need not exist."""
    from persisting.store_address import is_store_address, parse

    address = topic if is_store_address(topic) else storage
    is_path = os.sep in topic or topic in (".", "..")
    if not is_store_address(address) or (is_path and address is storage):
        folder = folder_of(topic, storage)
        return TopicPlace(folder.name, str(folder.parent), folder)
    _load_arrow()
    from persisting.topic.topic_names import check_name

    refuse_store(topic, storage)
    whole = parse(topic) if address is topic else parse(storage) / check_name("topic", topic)
    return TopicPlace(whole.name, str(whole.parent), store_at(str(whole)))


def store_at(address: str) -> ObjectStore:
    """Return the store at an address, with credentials from the environment."""
    from persisting.store.object_store import open_store
    from persisting.store.storage_options import StorageOptions
    from persisting.store_address import parse

    return open_store(parse(address), StorageOptions())


def _load_arrow() -> None:
    """Start quickly, in a process that runs nothing else."""
    if cli.owns_process:
        from persisting.arrow_loading import load_without_pandas

        load_without_pandas()


def buckets(source: TopicFolder, chosen: int | None) -> list[int]:
    """Return the chosen bucket of a topic, or all."""
    if chosen is None:
        return list(source.buckets)
    if chosen not in source.buckets:
        raise click.UsageError(
            f"The topic has no bucket {chosen}; its buckets are 0 to {len(source.buckets) - 1}."
        )
    return [chosen]


def columns(source: TopicFolder, chosen: list[str] | None) -> list[str]:
    """Return the chosen fields of a topic, or all."""
    names: list[str] = source.schema().names
    for name in chosen or []:
        if name not in names:
            raise click.UsageError(f"The topic has no field {name!r}; {choices(name, names)}")
    return names if chosen is None else chosen


def find_recovered(topic: str, storage: str) -> TopicFolder:
    """Find a topic and replay the log that a crashed owner left behind."""
    source = find_topic(topic, storage)
    source.recover()
    return source


def find_followed(topic: str, storage: str) -> TopicFolder:
    """Find a topic to read by snapshots, which include its owner's log."""
    source = find_topic(topic, storage)
    source.recover_own_logs()
    return source


def note_unflushed(source: TopicFolder, *, reads_log: bool = False, hint: str = "") -> None:
    """Print a note if an owner has the topic open and may hold records that are not shown.

    ``reads_log``: the command shows the records of the owner's log. ``hint`` says how it could show
    the others.
    """
    from persisting.bucket.log_note import noted_log
    from persisting.fs import current
    from persisting.lock import owner_of
    from persisting.topic.spec import bucket_folder
    from persisting.topic.store_files import StoreTopic
    from persisting.wal import FOLDER as LOG

    if isinstance(source, StoreTopic):
        if not reads_log:
            _note_unflushed_in_store(source, hint)
        return
    owner = None
    logs = set()
    for bucket in source.buckets:
        folder = bucket_folder(source.folder, bucket)
        holder = owner_of(folder)
        if holder is not None and not holder.get("passing"):
            owner = holder
            logs |= {folder / LOG, noted_log(folder, current()) or folder / LOG}
    pending = 0
    for log in logs:
        for segment in log.glob("*.wal"):
            with suppress(FileNotFoundError):  # its owner has just deleted it
                pending += segment.stat().st_size
    logged = bool(source.config.options.get("enable_wal"))
    if owner is None or (logged and (reads_log or not pending)):
        return
    missing = f"{format_size(pending)} of its log" if logged else "records not flushed yet"
    output.say(
        f"note: process {owner.get('pid')} on {owner.get('host')} has the topic open for writing; "
        f"this output does not include {missing}" + (f"; {hint}" if hint else "")
    )


def _note_unflushed_in_store(source: StoreTopic, hint: str) -> None:
    for bucket in source.buckets:
        owner = source.owner(bucket)
        if owner is not None:
            output.say(
                f"note: process {owner['pid']} on {owner['host']} has the topic open for writing, "
                "or was killed; this output does not include what it has not flushed yet"
                + (f"; {hint}" if hint else "")
            )
            return


@asynccontextmanager
async def reader(topic: str, storage: str, bucket: int | None = None) -> AsyncIterator[QueueReader]:
    """Open a reader of a topic on disk."""
    from persisting.queue import read_queue

    place, _, name = find_topic(topic, storage).place.rpartition("/")
    opened = await read_queue(topic=name, storage_path=place or "/", bucket_id=bucket)
    async with opened:
        yield opened


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation; without a terminal, ``--yes`` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"Not a terminal; pass --yes to confirm: {question}")
    click.confirm(question, abort=True, err=True)


class Progress:
    """Counts completed work and shows it on a terminal."""

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
    """Show a progress bar with rate and remaining time on the error output."""
    if quiet or not output.is_terminal(sys.stderr):
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
