"""``backup create``, ``backup verify`` and ``backup restore``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from persisting.cli import exit_codes, output, parameters, topics_access
from persisting.cli.command_group import CommandGroup
from persisting.cli.json_contract import prints
from persisting.cli.parameters import LocalPath


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
@click.argument("folder", type=LocalPath())
@parameters.storage
@parameters.as_json
@prints("backup create", "persisting.cli.commands.backup:BackupResult")
def create(topic: str, folder: str, storage: str, as_json: bool) -> None:
    """Copy a topic into a new folder: all acknowledged records, its tags and its groups.

    The owner may keep writing. If the topic has no log, records that the owner has not flushed are
    only in its memory and are not copied.

    \b
    Example:
      persisting backup create events /backups/events-2026-11-15
    """
    from persisting.topic import backup as copies

    source, started = topics_access.find_topic(topic, storage), time.monotonic()
    with topics_access.progress("copying", quiet=as_json, unit="bytes") as progress:
        done = copies.create(source, Path(folder).absolute(), progress.advance)
    _print_backup(done, folder, time.monotonic() - started, as_json)


@backup.command()
@click.argument("folder", type=LocalPath())
@parameters.as_json
@prints("backup verify", "persisting.cli.commands.backup:BackupCheck")
def verify(folder: str, as_json: bool) -> None:
    """Compare every file of a backup with its checksum; exit with 5 if one is damaged.

    \b
    Example:
      persisting backup verify /backups/events-2026-11-15
    """
    from persisting.topic import backup as copies

    place, started = Path(folder).absolute(), time.monotonic()
    manifest = copies.load(place)
    with topics_access.progress(
        "checking", manifest.bytes, quiet=as_json, unit="bytes"
    ) as progress:
        damaged = copies.damage_in(place, progress.advance)
    result = BackupCheck(
        str(place),
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
@click.argument("folder", type=LocalPath())
@click.argument("topic", required=False)
@parameters.storage
@parameters.as_json
@prints("backup restore", "persisting.cli.commands.backup:BackupResult")
def restore(folder: str, topic: str | None, storage: str, as_json: bool) -> None:
    """Restore a backup as a new topic, checking every file.

    The topic must not exist. Without TOPIC it gets the name that it had.

    \b
    Examples:
      persisting backup restore /backups/events-2026-11-15 -s /data/queues
      persisting backup restore /backups/events-2026-11-15 events-again
    """
    from persisting.topic import backup as copies

    place, started = Path(folder).absolute(), time.monotonic()
    manifest = copies.load(place)
    target = topics_access.folder_of(topic or manifest.topic, storage)
    with topics_access.progress(
        "restoring", manifest.bytes, quiet=as_json, unit="bytes"
    ) as progress:
        copies.restore(place, target, progress.advance)
    manifest.topic = target.name
    _print_backup(manifest, str(target), time.monotonic() - started, as_json)


def _print_backup(manifest: Any, path: str, seconds: float, as_json: bool) -> None:
    result = BackupResult(
        topic=manifest.topic,
        path=str(Path(path).absolute()),
        rows=manifest.rows,
        log_bytes=sum(bucket.log_bytes for bucket in manifest.buckets),
        files=len(manifest.files),
        bytes=manifest.bytes,
        seconds=seconds,
    )
    log = f" and {output.size(result.log_bytes)} of log" if result.log_bytes else ""
    output.show(
        result,
        as_json,
        lambda: output.line(
            f"{output.plural(result.rows, 'record')}{log} of {result.topic} in {result.path} "
            f"({output.plural(result.files, 'file')}, {output.size(result.bytes)}, "
            f"{output.seconds(seconds)})"
        ),
    )


def _print_check(result: BackupCheck) -> None:
    for problem in result.damaged:
        output.line(f"damaged: {problem}")
    state = "no damage found" if result.ok else "DAMAGE FOUND; use another backup"
    output.line(
        f"{output.plural(result.files, 'file')}, {output.size(result.bytes)}: {state} "
        f"({output.seconds(result.seconds)})"
    )
