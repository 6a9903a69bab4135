"""``backup create``, ``backup verify`` and ``backup restore``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from persisting.actions.text_values import format_size
from persisting.cli import exit_codes, output, parameters, topics_access
from persisting.cli.command_group import CommandGroup
from persisting.cli.json_contract import prints
from persisting.cli.parameters import AnyPlace
from persisting.store_address import is_store_address

if TYPE_CHECKING:
    from persisting.store.object_store import ObjectStore


class BackupResult(msgspec.Struct):
    """What a backup holds."""

    topic: str
    path: str
    rows: int
    """Rows in the tables; opening the restored topic adds the records of the logs."""
    log_bytes: int
    files: int
    bytes: int
    seconds: float


class BackupCheck(msgspec.Struct):
    """The result of checking a backup."""

    path: str
    ok: bool
    files: int
    bytes: int
    damaged: list[str]
    seconds: float


@click.group(cls=CommandGroup)
def backup() -> None:
    """Copy a topic while it is written, check the copy, restore it as a topic.

    \b
    Examples:
      persisting backup create events /backups/events-2026-11-15
      persisting backup verify /backups/events-2026-11-15
      persisting backup restore /backups/events-2026-11-15 events-again
    """


@backup.command()
@parameters.topic
@click.argument("folder", type=AnyPlace())
@parameters.storage
@parameters.as_json
@prints("backup create", "persisting.cli.commands.backup:BackupResult")
def create(topic: str, folder: str, storage: str, as_json: bool) -> None:
    """Copy a topic into a new folder: all acknowledged records, its tags and its groups.

    FOLDER may be an address in an object store, whether or not the topic is in one. The owner may
    keep writing. If the topic has no log, records that the owner has not flushed are only in its
    memory and are not copied.

    \b
    Examples:
      persisting backup create events /backups/events-2026-11-15
      persisting backup create events s3://bucket/backups/events-2026-11-15
    """
    from persisting.topic import backup as copies

    source, started = topics_access.find_topic(topic, storage), time.monotonic()
    with topics_access.progress("copying", quiet=as_json, unit="bytes") as progress:
        done = copies.create(source, _place(folder), progress.advance)
    _print_backup(done, _shown(_place(folder)), time.monotonic() - started, as_json)


@backup.command()
@click.argument("folder", type=AnyPlace())
@parameters.as_json
@prints("backup verify", "persisting.cli.commands.backup:BackupCheck")
def verify(folder: str, as_json: bool) -> None:
    """Compare every file of a backup with its checksum; exit with 5 if one is damaged.

    \b
    Example:
      persisting backup verify /backups/events-2026-11-15
    """
    from persisting.topic import backup as copies

    place, started = _place(folder), time.monotonic()
    manifest = copies.load(place)
    with topics_access.progress(
        "checking", manifest.bytes, quiet=as_json, unit="bytes"
    ) as progress:
        damaged = copies.damage_in(place, progress.advance)
    result = BackupCheck(
        _shown(place),
        not damaged,
        len(manifest.files),
        manifest.bytes,
        damaged,
        time.monotonic() - started,
    )
    output.show(result, as_json, lambda: _print_check(result))
    if damaged:
        raise exit_codes.CommandExit(exit_codes.DAMAGED)


@backup.command()
@click.argument("folder", type=AnyPlace())
@click.argument("topic", required=False)
@parameters.storage
@parameters.as_json
@prints("backup restore", "persisting.cli.commands.backup:BackupResult")
def restore(folder: str, topic: str | None, storage: str, as_json: bool) -> None:
    """Restore a backup as a new topic, checking every file.

    The topic must not exist. Without TOPIC it gets the name that it had. A backup of a topic in a
    folder can become one in an object store, and the other way round.

    \b
    Examples:
      persisting backup restore /backups/events-2026-11-15 -s /data/queues
      persisting backup restore /backups/events-2026-11-15 events-again
      persisting backup restore s3://bucket/backups/events-2026-11-15 -s s3://bucket/queues
    """
    from persisting.topic import backup as copies

    place, started = _place(folder), time.monotonic()
    manifest = copies.load(place)
    target = topics_access.place_of(topic or manifest.topic, storage)
    with topics_access.progress(
        "restoring", manifest.bytes, quiet=as_json, unit="bytes"
    ) as progress:
        copies.restore(place, target.place, progress.advance)
    manifest.topic = target.name
    _print_backup(manifest, str(target), time.monotonic() - started, as_json)


def _place(text: str) -> Path | ObjectStore:
    return topics_access.store_at(text) if is_store_address(text) else Path(text).absolute()


def _shown(place: Path | ObjectStore) -> str:
    return str(place) if isinstance(place, Path) else str(place.address)


def _print_backup(manifest: Any, path: str, seconds: float, as_json: bool) -> None:
    result = BackupResult(
        topic=manifest.topic,
        path=path,
        rows=manifest.rows,
        log_bytes=sum(bucket.log_bytes for bucket in manifest.buckets),
        files=len(manifest.files),
        bytes=manifest.bytes,
        seconds=seconds,
    )
    log = f" and {format_size(result.log_bytes)} of log" if result.log_bytes else ""
    output.show(
        result,
        as_json,
        lambda: output.line(
            f"{output.plural(result.rows, 'record')}{log} of {result.topic} in {result.path} "
            f"({output.plural(result.files, 'file')}, {format_size(result.bytes)}, "
            f"{output.seconds(seconds)})"
        ),
    )


def _print_check(result: BackupCheck) -> None:
    for problem in result.damaged:
        output.line(f"damaged: {problem}")
    state = "no damage found" if result.ok else "DAMAGE FOUND; use another backup"
    output.line(
        f"{output.plural(result.files, 'file')}, {format_size(result.bytes)}: {state} "
        f"({output.seconds(result.seconds)})"
    )
