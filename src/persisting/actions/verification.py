"""Compares the files and logs of a topic with what was written."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from persisting.topic.topic_files import TopicFolder


class Damage(msgspec.Struct):
    """A file that differs from what was written."""

    bucket: int
    file: str
    problem: str
    start_offset: int | None = None
    end_offset: int | None = None


class LogState(msgspec.Struct):
    """The state of a log: of one bucket, or one that buckets share."""

    bucket: int | None
    """None for a log that buckets share."""
    state: str
    """empty, whole, torn, damaged, missing, or unused: nothing needs it."""
    problem: str | None = None
    path: str | None = None
    buckets: list[int] = []
    """The buckets that need it."""


class Verified(msgspec.Struct):
    """The result of a verification."""

    topic: str
    ok: bool
    rows: int
    files: int
    damaged: list[Damage]
    unchecked: list[str]
    """Files that were written without a checksum."""
    logs: list[LogState]
    seconds: float


async def verify(
    source: TopicFolder, verify_tables: Callable[[], Awaitable[dict[str, Any]]]
) -> Verified:
    """Verify a topic; ``verify_tables`` opens a reader and returns what its ``verify()`` returns.

    The logs come first, since opening a reader replays a log that a crashed owner left. If one is
    damaged, the tables are not opened.
    """
    from persisting.concurrency.pool import in_thread

    started = time.monotonic()
    logs = await in_thread(log_states, source)
    log_damaged = any(log.state in ("damaged", "missing") for log in logs)
    report: dict[str, Any] = {"ok": False, "rows": 0, "files": 0, "damaged": [], "unchecked": []}
    if not log_damaged:
        report = await verify_tables()
    return Verified(
        topic=source.config.topic,
        ok=bool(report["ok"]) and not log_damaged,
        rows=report["rows"],
        files=report["files"],
        damaged=[_damage(file) for file in report["damaged"]],
        unchecked=report["unchecked"],
        logs=logs,
        seconds=time.monotonic() - started,
    )


def log_states(source: TopicFolder) -> list[LogState]:
    """Return the shared logs of a topic, and the logs of buckets that need none of them.

    In an object store all logs are shared.
    """
    from persisting.topic.inspect import log_of, logs_of, place_of_log
    from persisting.topic.spec import bucket_folder
    from persisting.topic.store_files import StoreTopic
    from persisting.wal import FOLDER

    states, sharing = [], set()
    for shared in logs_of(source):
        buckets = [bucket.bucket for bucket in shared.noting]
        sharing |= set(buckets)
        used = shared.owned or bool(buckets)
        problem = shared.problem if used else None
        state = shared.state if used else "unused"
        states.append(LogState(None, state, problem, place_of_log(source, shared), buckets))
    if isinstance(source, StoreTopic):
        return states
    for bucket in source.buckets:
        log = log_of(source, bucket)
        if bucket not in sharing or log.state != "empty":
            path = bucket_folder(source.folder, bucket) / FOLDER
            states.append(LogState(bucket, log.state, log.problem, str(path), [bucket]))
    return states


def _damage(file: dict[str, Any]) -> Damage:
    offsets = file.get("offsets") or (None, None)
    return Damage(file["bucket"], file["file"], file["problem"], *offsets)
