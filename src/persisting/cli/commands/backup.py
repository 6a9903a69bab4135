"""``backup create``, ``backup verify`` and ``backup restore``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from persisting.cli import exit_codes, output, parameters, topics_access
from persisting.cli.json_contract import prints
from persisting.cli.parameters import OwnPath


class BackupResult(msgspec.Struct):
    """What a backup holds."""

    topic: str
    path: str
    rows: int
    """Rows in the tables; what the logs hold comes on top when the copy is opened."""
    log_bytes: int
    files: int
    bytes: int
    seconds: float


class BackupCheck(msgspec.Struct):
    """What a check of a backup found."""

    path: str
    ok: bool
    files: int
    bytes: int
    damaged: list[str]
    seconds: float


@click.group()
def backup() -> None:
    """Copy a topic while it is written, check the copy, make a topic of it.

    \b
    Examples:
      persisting backup create events /backups/events-2026-11-15
      persisting backup verify /backups/events-2026-11-15
      persisting backup restore /backups/events-2026-11-15 events-again
    """


@backup.command()
@parameters.topic
@click.argument("folder", type=OwnPath())
@parameters.storage
@parameters.as_json
@prints("backup create", "persisting.cli.commands.backup:BackupResult")
def create(topic: str, folder: str, storage: str, as_json: bool) -> None:
    """Copy a topic into a new folder: all that was acknowledged before, tags and groups too.

    Its owner may go on writing. Without a log, what the owner has not flushed is only in its memory
    and not in the copy.

    \b
    Example:
      persisting backup create events /backups/events-2026-11-15
    """
    from persisting.topic import backup as copies

    source, started = topics_access.stored(topic, storage), time.monotonic()
    with topics_access.progress("copying", quiet=as_json, unit="bytes") as progress:
        done = copies.create(source, Path(folder).absolute(), progress.advance)
    _tell(done, folder, time.monotonic() - started, as_json)


@backup.command()
@click.argument("folder", type=OwnPath())
@parameters.as_json
@prints("backup verify", "persisting.cli.commands.backup:BackupCheck")
def verify(folder: str, as_json: bool) -> None:
    """Compare every file of a backup with its checksum. Ends with 5 on damage.

    \b
    Example:
      persisting backup verify /backups/events-2026-11-15
    """
    from persisting.topic import backup as copies

    place, started = Path(folder).absolute(), time.monotonic()
    known = copies.load(place)
    with topics_access.progress("checking", known.bytes, quiet=as_json, unit="bytes") as progress:
        damaged = copies.damage_in(place, progress.advance)
    result = BackupCheck(
        str(place),
        not damaged,
        len(known.files),
        known.bytes,
        damaged,
        time.monotonic() - started,
    )
    output.show(result, as_json, lambda: _tell_check(result))
    if damaged:
        raise exit_codes.Ended(exit_codes.DAMAGED)


@backup.command()
@click.argument("folder", type=OwnPath())
@click.argument("topic", required=False)
@parameters.storage
@parameters.as_json
@prints("backup restore", "persisting.cli.commands.backup:BackupResult")
def restore(folder: str, topic: str | None, storage: str, as_json: bool) -> None:
    """Make a topic of a backup; every file is compared on the way.

    The topic must not exist. Without a name it gets the one that it had.

    \b
    Examples:
      persisting backup restore /backups/events-2026-11-15 -s /data/queues
      persisting backup restore /backups/events-2026-11-15 events-again
    """
    from persisting.topic import backup as copies

    place, started = Path(folder).absolute(), time.monotonic()
    known = copies.load(place)
    target = topics_access.folder_of(topic or known.topic, storage)
    with topics_access.progress("restoring", known.bytes, quiet=as_json, unit="bytes") as progress:
        copies.restore(place, target, progress.advance)
    known.topic = target.name
    _tell(known, str(target), time.monotonic() - started, as_json)


def _tell(done: Any, path: str, seconds: float, as_json: bool) -> None:
    result = BackupResult(
        topic=done.topic,
        path=str(Path(path).absolute()),
        rows=done.rows,
        log_bytes=sum(one.log_bytes for one in done.buckets),
        files=len(done.files),
        bytes=done.bytes,
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


def _tell_check(result: BackupCheck) -> None:
    for one in result.damaged:
        output.line(f"damaged: {one}")
    state = "all is well" if result.ok else "DAMAGE FOUND; use another backup"
    output.line(
        f"{output.plural(result.files, 'file')}, {output.size(result.bytes)}: {state} "
        f"({output.seconds(result.seconds)})"
    )
