"""One round: a process works on a topic under a fault; then everything on disk is checked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from support.crash.checks import PromiseBroken

from persisting import fs
from persisting.bucket.group_offsets import read_committed
from persisting.errors import BucketLocked, StorageError
from persisting.queue import read_queue, write_queue
from persisting.topic import backup
from persisting.topic.table_calls import Restores
from torture import injector, scenario
from torture.bucket_model import Span, difference
from torture.follower_model import Content, FollowerModel
from torture.records import Record
from torture.scenario import Round
from torture.topic_model import Note, TopicModel
from torture.worker import GROUP, TOPIC, spans
from torture.workspace import Workspace

TESTS = Path(__file__).parents[1]
PATIENCE = 120.0
"""Seconds without a note after which the process counts as hanging."""
CATCH_UP_SECONDS = 120.0
"""Seconds in which a reader must be shown everything after the work of a round."""
NOTHING: Mapping[str, str] = MappingProxyType({})
RECOVER_WITHOUT_LOG = 0.3
"""Probability that the log of a round is recovered by opening the topic without a log."""


class Child:
    """A process that writes notes; a thread reads them."""

    def __init__(
        self, module: str, *args: str | bytes, errors: Path, environ: Mapping[str, str] = NOTHING
    ) -> None:
        self.errors = errors
        with errors.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, "PYTHONPATH": str(TESTS), **environ},
            )
        self.notes: list[Note] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):
                with self._more:
                    self.notes.append(json.loads(line))
                    self._more.notify_all()
        with self._more:
            self._more.notify_all()

    def wait_for_notes(self, count: int) -> bool:
        """Wait until the process has written ``count`` notes; return whether it is still
        running."""
        deadline = time.monotonic() + PATIENCE
        with self._more:
            while len(self.notes) < count and self._reader.is_alive():
                if not self._more.wait(deadline - time.monotonic()):
                    raise self._hanging()
        return self._reader.is_alive()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def wait(self) -> int:
        """Wait until the process exits. It may take as long as it needs while it writes notes."""
        while self._reader.is_alive():
            before = len(self.notes)
            self._reader.join(PATIENCE)
            if self._reader.is_alive() and len(self.notes) == before:
                raise self._hanging()
        return self._process.wait()

    def _hanging(self) -> PromiseBroken:
        for number in (signal.SIGUSR2, signal.SIGUSR1):
            self.signal(number)
            time.sleep(0.5)
        return PromiseBroken(
            f"the process hangs after {self.notes[-3:]}\n{self.errors.read_text()[-9000:]}"
        )

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


class Worker(Child):
    """The process of a round."""

    def __init__(
        self, workspace: Workspace, round_: Round, library: Path, follower: Follower
    ) -> None:
        environ: dict[str, str] = {}
        self._control: injector.Control | None = None
        if round_.fault != "power":
            workspace.control.unlink(missing_ok=True)
            self._control = injector.Control(workspace.control)
            environ = injector.environment(library, workspace.disk, workspace.control)
        super().__init__(
            "torture.worker",
            str(workspace.folder),
            msgspec.json.encode(round_),
            str(follower.pid),
            errors=workspace.errors,
            environ=environ,
        )

    @property
    def failed_calls(self) -> int:
        return 0 if self._control is None else self._control.fired


class Follower:
    """A reader in another process. It follows the topic over all rounds, unless power is lost."""

    def __init__(self, workspace: Workspace, num_buckets: int, tally: Counter[str]) -> None:
        self._tally = tally
        self._workspace, self._model = workspace, FollowerModel(num_buckets)
        self._errors: list[str] = []
        """Errors that the reader got since they were last checked."""
        self._start()

    def _start(self) -> None:
        errors = self._workspace.folder / "follower.txt"
        self._child = Child("torture.follower", str(self._workspace.queues), errors=errors)
        self._read = 0

    @property
    def pid(self) -> int:
        return self._child.pid

    def restart(self) -> None:
        """Start again on the disk that power loss has left."""
        self._child.close()
        self._start()
        self._model.restart()

    def wait(self) -> None:
        self._child.wait()

    def close(self) -> None:
        self._child.close()

    def follow(self, work: list[Note], records: dict[str, Record]) -> None:
        """Check what the reader was shown against the notes of the owner so far."""
        for note in work:
            for bucket, look in note.get("observation", {"buckets": {}})["buckets"].items():
                span = look["end"] - len(look["ids"]), look["ids"]
                self._model.observe(int(bucket), look["epoch"], span)
        self._read_notes(records)

    def _read_notes(self, records: dict[str, Record]) -> None:
        notes = self._child.notes[self._read :]
        self._read += len(notes)
        for note in notes:
            self._model.follow(note, records)
            self._tally["records followed"] += len(note.get("seen", ()))
            self._tally["restores followed"] += "restored" in note
            if "failed" in note:
                self._tally["errors of the reader"] += 1
                self._errors.append(note["error"])

    def check_errors(self, failed_calls: int) -> None:
        """Raise if the reader got an error though no call of the owner failed."""
        errors, self._errors = self._errors, []
        if errors and not failed_calls:
            raise PromiseBroken(f"a reader without the lock raised {errors[0]}")

    async def catch_up(
        self, contents: dict[int, Content], records: dict[str, Record], *, lossy: bool
    ) -> None:
        """Wait until the reader was shown everything; raise if that takes too long."""
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while reason := self._model.behind(contents, lossy=lossy):
            if time.monotonic() > deadline:
                raise PromiseBroken(f"a reader without the lock does not continue: {reason}")
            await asyncio.sleep(0.01)
            self._read_notes(records)

    def check(self, contents: dict[int, Content], *, lossy: bool) -> None:
        self._model.check(contents, lossy=lossy)


async def play(
    workspace: Workspace,
    round_: Round,
    model: TopicModel,
    library: Path,
    tally: Counter[str],
    follower: Follower,
) -> None:
    """Let a process work under its fault, then check what it left on disk."""
    child = Worker(workspace, round_, library, follower)
    try:
        await _inject_faults(child, round_, workspace.queues)
        code = child.wait()
    finally:
        child.close()
    model.begin_round(round_)
    for note in child.notes:
        model.follow(note)
    killed = code == -signal.SIGKILL
    if not killed and (code != 0 or "end" not in child.notes[-1]):
        raise PromiseBroken(
            f"the process exited with status {code}:\n{child.errors.read_text()[-3000:]}"
        )
    power_lost = workspace.lost.exists()
    if power_lost:
        follower.wait()
    follower.follow(child.notes, model.records)
    if power_lost:
        shutil.rmtree(workspace.disk)
        workspace.lost.rename(workspace.disk)
        tally["power lost"] += 1
    elif killed:
        tally["killed"] += 1
    tally["notes"] += len(child.notes)
    tally["calls that failed"] += child.failed_calls
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about options that changed
        lossy = (power_lost or killed) and not round_.logged
        is_torn = power_lost and not round_.logged
        if is_torn:  # a torn table cannot be read before its next owner repairs it
            await check(workspace, round_, model)
        contents = await _read_without_lock(workspace.queues, round_.num_buckets)
        if power_lost:
            follower.restart()
        await follower.catch_up(contents, model.records, lossy=lossy)
        if not is_torn:
            await check(workspace, round_, model)
    _check_recovered(contents, model)
    follower.check_errors(child.failed_calls)
    follower.check(contents, lossy=lossy)


async def _read_without_lock(disk: Path, num_buckets: int) -> dict[int, Content]:
    """Return what a new reader finds before the topic has another owner."""
    if not (disk / TOPIC / "topic.json").exists():
        return {}
    contents = {}
    try:
        for bucket in range(num_buckets):
            where: dict[str, Any] = {"topic": TOPIC, "storage_path": str(disk)}
            async with await read_queue(**where, bucket_id=bucket) as reader:
                page = await reader._topic.bucket(bucket).read(0, None)
                contents[bucket] = Content(page.epoch, (page.first, [r["id"] for r in page.rows]))
    except StorageError as exc:
        raise PromiseBroken(f"the topic cannot be read without its lock: {exc!r}") from exc
    return contents


def _check_recovered(contents: dict[int, Content], model: TopicModel) -> None:
    """Raise unless the next owner found what readers saw without it."""
    for bucket, content in contents.items():
        found = model.buckets[bucket].start, model.buckets[bucket].ids
        if found != content.span:
            raise PromiseBroken(
                f"bucket {bucket}: its next owner has {found[0]} to {found[0] + len(found[1])}, "
                f"a reader without the lock found {content.span[0]} to {content.end} before: "
                f"{difference(found[1], content.span[1])}"
            )


async def _inject_faults(child: Child, round_: Round, disk: Path) -> None:
    """Inject the faults that come from outside the process."""
    rng = round_.rng("outside")
    if round_.fault == "kill":
        child.wait_for_notes(rng.choice((1, rng.randrange(40), rng.randrange(300))))
        await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 0.05))))
        child.signal(signal.SIGKILL)
    elif round_.fault == "pause":
        for _ in range(rng.randint(1, 3)):
            if not child.wait_for_notes(len(child.notes) + rng.randrange(40)):
                return
            child.signal(signal.SIGSTOP)
            await _check_lock_excludes_writers(disk, child)
            await asyncio.sleep(rng.uniform(0, 0.3))
            child.signal(signal.SIGCONT)


async def _check_lock_excludes_writers(disk: Path, child: Child) -> None:
    if _may_have_no_owner(child):
        return
    try:
        # Without the socket, which would have the put wait for the owner.
        async with await write_queue(
            topic=TOPIC, storage_path=str(disk), local_socket=False
        ) as writer:
            await writer.put({"id": "a stranger's"})
    except BucketLocked as exc:
        if str(child.pid) not in str(exc):
            raise PromiseBroken(f"the owner is {child.pid}, but the error says {exc}") from exc
    else:
        raise PromiseBroken("two processes wrote to one bucket")


def _may_have_no_owner(child: Child) -> bool:
    """Return whether the topic may have no owner now: an observation opens every bucket, a close
    releases them."""
    changes = [
        n
        for n in child.notes
        if n.get("begin") in ("open", "close") or {"observation", "end"} & set(n)
    ]
    return not changes or "observation" not in changes[-1]


# Checks


async def check(workspace: Workspace, round_: Round, model: TopicModel) -> None:
    """Open the topic, read everything and compare it with the model."""
    disk, num_buckets = workspace.queues, round_.num_buckets
    if not (disk / TOPIC / "topic.json").exists():
        if model.records:
            raise PromiseBroken("the topic is missing")
        return
    try:
        async with await _open_topic(disk, round_) as writer:
            rows, found = await _read_all(disk, TOPIC, num_buckets)
            model.reconcile_after_exit(
                found, {tag["name"]: spans(tag) for tag in await writer.tags()}
            )
            model.check_rows(rows)
            await _check_tags(disk, num_buckets, model)
            report = await writer.verify()
            if not report["ok"] or report["unchecked"]:
                raise PromiseBroken(f"verify: {report}")
            model.check_group(await _committed(disk, writer, num_buckets))
            await _check_indexes(writer, rows)
        await _check_backups(workspace, num_buckets, model)
    except StorageError as exc:
        raise PromiseBroken(
            f"the topic cannot be opened or read: {type(exc).__name__}: {exc}"
        ) from exc


async def _open_topic(disk: Path, round_: Round) -> Any:
    """Open the topic without retention limits, and sometimes without a log."""
    options: dict[str, Any] = dict(scenario.NO_LIMITS) if round_.limits else {}
    if round_.logged and round_.rng("check").random() < RECOVER_WITHOUT_LOG:
        options["enable_wal"] = False
    return await write_queue(topic=TOPIC, storage_path=str(disk), backend_options=options or None)


async def check_written(
    workspace: Workspace, num_buckets: int, model: TopicModel, records: list[Record]
) -> None:
    """Check that records of another writer were appended once, in any order."""
    for record in records:
        model.records[record["id"]] = record
    rows, spans = await _read_all(workspace.queues, TOPIC, num_buckets)
    model.check_rows(rows)
    added = []
    for bucket, (start, ids) in spans.items():
        known = model.buckets[bucket]
        if start != known.start or ids[: len(known.ids)] != known.ids:
            raise PromiseBroken(f"bucket {bucket}: earlier rows have changed")
        added += ids[len(known.ids) :]
        known.reconcile((start, ids))
        known.flushed = known.end
    if sorted(added) != sorted(record["id"] for record in records):
        raise PromiseBroken(
            f"{len(records)} records were written, {len(added)} were added: {sorted(added)}"
        )


async def _read_all(
    disk: Path, topic: str, num_buckets: int, **given: Any
) -> tuple[dict[int, list[Record]], dict[int, Span]]:
    rows, spans = {}, {}
    for bucket in range(num_buckets):
        async with await read_queue(
            topic=topic, storage_path=str(disk), bucket_id=bucket
        ) as reader:
            rows[bucket] = await reader.get(None, **given)
            stats = (await reader.stats())["buckets"][0]
        start, end = stats["start_offset"], stats["end_offset"]
        if not given and end - start != len(rows[bucket]):
            raise PromiseBroken(f"bucket {bucket}: {start} to {end}, but {len(rows[bucket])} rows")
        spans[bucket] = (start, [row["id"] for row in rows[bucket]])
    return rows, spans


async def _check_tags(disk: Path, num_buckets: int, model: TopicModel) -> None:
    for name, expected in model.tags.items():
        rows, spans = await _read_all(disk, TOPIC, num_buckets, version=name)
        model.check_rows(rows)
        for bucket, (_, ids) in expected.items():
            if spans[bucket][1] != ids:
                raise PromiseBroken(
                    f"tag {name}, bucket {bucket}: {spans[bucket][1]} instead of {ids}"
                )


async def _committed(disk: Path, writer: Any, num_buckets: int) -> dict[int, int]:
    group = disk / TOPIC / "groups" / GROUP
    found = {}
    for bucket in range(num_buckets):
        restores = await writer._topic.bucket(bucket).call(Restores())
        found[bucket] = read_committed(group, bucket, fs.current()).now(restores)
    return found


async def _check_indexes(writer: Any, rows: dict[int, list[Record]]) -> None:
    stored = [row for found in rows.values() for row in found]
    if not stored:
        return
    for index in await writer.indexes():
        column = index["column"]
        if column in ("n", "id"):
            value = stored[len(stored) // 2][column]
            found = sorted(row["id"] for row in await writer.lookup(column, value))
            expected = sorted(row["id"] for row in stored if row[column] == value)
        elif column == "text":
            word = stored[0]["text"].split()[0]
            hits = await writer.search(text=word, column="text", k=len(stored))
            found = sorted(hit["id"] for hit in hits)
            expected = sorted(row["id"] for row in stored if row["text"].startswith(word))
        else:
            continue
        if found != expected:
            raise PromiseBroken(f"the index of {column} finds {found} instead of {expected}")


async def _check_backups(workspace: Workspace, num_buckets: int, model: TopicModel) -> None:
    """A backup holds everything acknowledged before it, and nothing that was never put."""
    for name, floors in model.backups.items():
        copy, restored = workspace.queues / name, workspace.folder / "restored"
        if damage := backup.damage_in(copy):
            raise PromiseBroken(f"{name}: {damage}")
        backup.restore(copy, restored / name)
        rows, spans = await _read_all(restored, name, num_buckets)
        model.check_rows(rows)
        for bucket, (start, ids) in spans.items():
            least = floors[bucket]
            if start < least[0] or start + len(ids) < least[1]:
                raise PromiseBroken(
                    f"{name}, bucket {bucket}: {start} to {start + len(ids)}, not {least}"
                )
            if len(set(ids)) != len(ids):
                raise PromiseBroken(f"{name}, bucket {bucket}: rows are stored twice")
        shutil.rmtree(restored)
    model.backups.clear()
    for left in workspace.queues.glob("backup-*"):
        shutil.rmtree(left)
