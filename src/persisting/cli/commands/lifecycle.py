"""``create`` and ``delete``: the beginning and the end of a topic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from persisting.actions.text_values import format_size
from persisting.cli import output, parameters, topics_access
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Setting
from persisting.cli.topics_access import TopicPlace
from persisting.options import DURABLE

if TYPE_CHECKING:
    from persisting.store.object_store import ObjectStore


class Created(msgspec.Struct):
    """A new topic."""

    topic: str
    path: str
    backend: str
    num_buckets: int
    bucket_column: str
    options: dict[str, Any]


class Deleted(msgspec.Struct):
    """A topic that was deleted, or in a dry run would be."""

    topic: str
    path: str
    rows: int
    bytes: int
    dry_run: bool = False


@click.command()
@parameters.topic
@click.option(
    "--durable",
    is_flag=True,
    help="Refuse settings under which an acknowledged record could be lost in a power failure.",
)
@parameters.buckets
@parameters.bucket_column
@click.option("--backend", help="Backend of the topic.  [default: persisting]")
@click.option(
    "--set",
    "settings",
    type=Setting(),
    multiple=True,
    help="Option of the backend; may be repeated.",
)
@parameters.storage
@parameters.as_json
@prints("create", "persisting.cli.commands.lifecycle:Created")
def create(
    topic: str,
    durable: bool,
    buckets: int | None,
    bucket_column: str | None,
    backend: str | None,
    settings: tuple[tuple[str, Any], ...],
    storage: str,
    as_json: bool,
) -> None:
    """Create an empty topic; by default every acknowledged record survives a power failure.

    The default is a log that is synced before each acknowledgement, as with durable=True in Python.
    --set and --backend change it; --durable makes sure that they do not.

    \b
    Examples:
      persisting create orders --durable --buckets 8 --bucket-column customer
      persisting create clicks --set wal_sync_interval=1
    """
    place = topics_access.place_of(topic, storage)
    if place.exists:
        raise click.UsageError(
            f"The topic {place.name!r} already exists; 'persisting describe' shows it."
        )
    if backend == "memory":
        raise click.UsageError("The backend 'memory' stores nothing; choose another --backend.")
    options = dict(settings)
    if not durable:
        backend = backend or "persisting"
        options = {**DURABLE, **options} if backend == "persisting" else options

    async def work() -> None:
        from persisting.queue import write_queue

        writer = await write_queue(
            topic=place.name,
            storage_path=place.root,
            num_buckets=buckets,
            bucket_column=bucket_column,
            backend=backend,
            backend_options=options,
            durable=durable,
        )
        await writer.close()

    topics_access.run(work())
    config = topics_access.find_topic(topic, storage).config
    result = Created(
        config.topic,
        str(place),
        config.backend,
        config.num_buckets,
        config.bucket_column,
        config.options,
    )
    output.show(result, as_json, lambda: _print_created(result))


def _print_created(result: Created) -> None:
    count = output.plural(result.num_buckets, "bucket")
    output.line(f"topic {result.topic} with {count} by {result.bucket_column!r} in {result.path}")


@click.command()
@parameters.topic
@parameters.dry_run
@parameters.yes
@parameters.storage
@parameters.as_json
@prints("delete", "persisting.cli.commands.lifecycle:Deleted")
def delete(topic: str, dry_run: bool, yes: bool, storage: str, as_json: bool) -> None:
    """Delete a topic with its records, versions, tags and consumer groups for good.

    A topic that another process has open for writing, or reads in a consumer group, is not deleted.
    If the command is interrupted, the topic is either whole or deleted; repeat the command to
    remove the rest of its files. In an object store a few small objects are kept, which refuse late
    writes of a process that was paused.

    \b
    Examples:
      persisting delete events --dry-run
      persisting delete events --yes
    """
    place = topics_access.place_of(topic, storage)
    if isinstance(place.place, Path):
        _delete_folder(place.place, dry_run, yes, as_json)
    else:
        _delete_in_store(place, place.place, dry_run, yes, as_json)


def _delete_in_store(
    place: TopicPlace, store: ObjectStore, dry_run: bool, yes: bool, as_json: bool
) -> None:
    from persisting.errors import NoSuchTopic
    from persisting.topic import inspect, store_config, store_deletion

    config = store_config.load_any(store)
    if config is None:
        raise NoSuchTopic(f"there is no topic {place.name!r} at {place.root}")
    facts = inspect.look_in_store(place.name, place.root).facts
    content = f"{output.plural(facts.rows, 'record')} ({format_size(facts.bytes)})"
    if dry_run:
        store_deletion.check_deletable(store, config)
    else:
        topics_access.confirm(f"Delete topic {place.name} with {content} for good?", yes)
        store_deletion.delete(store)
    _print_deleted(Deleted(place.name, str(place), facts.rows, facts.bytes, dry_run), as_json)


def _delete_folder(folder: Path, dry_run: bool, yes: bool, as_json: bool) -> None:
    from persisting.topic import deletion, inspect
    from persisting.topic.spec import has_file

    if not has_file(folder) and not dry_run and deletion.remove_leftovers(folder):
        result = Deleted(folder.name, str(folder), 0, 0)
        text = f"the rest of topic {folder.name}, whose deletion was interrupted, is removed"
        output.show(result, as_json, lambda: output.line(text))
        return
    deletion.check_deletable(folder)
    facts = inspect.look(folder).facts
    result = Deleted(folder.name, str(folder), facts.rows, facts.bytes, dry_run)
    content = f"{output.plural(facts.rows, 'record')} ({format_size(facts.bytes)})"
    if not dry_run:
        topics_access.confirm(f"Delete topic {folder.name} with {content} for good?", yes)
        deletion.delete(folder)
    _print_deleted(result, as_json)


def _print_deleted(result: Deleted, as_json: bool) -> None:
    content = f"{output.plural(result.rows, 'record')} ({format_size(result.bytes)})"
    would = "would be " if result.dry_run else ""
    output.show(
        result,
        as_json,
        lambda: output.line(f"topic {result.topic} with {content} {would}deleted"),
    )
