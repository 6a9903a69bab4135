"""One round: a process works on a topic under a fault; then all that is left is checked."""

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
from pathlib import Path
from typing import Any

import msgspec
from support.crash.checking import Broken

from persisting import fs
from persisting.bucket.group_offsets import read_committed
from persisting.errors import BucketLocked, StorageError
from persisting.queue import read_queue, write_queue
from persisting.topic import backup
from persisting.topic.table_calls import Restores
from torture import injector, plan
from torture.home import Home
from torture.model import Ledger, Note
from torture.plan import Round
from torture.records import Record
from torture.shelf import Span
from torture.worker import GROUP, TOPIC, spans

TESTS = Path(__file__).parents[1]
PATIENCE = 40.0
WITHOUT_LOG = 0.3
"""How often the log of a round is brought into the table by an opening without a log."""


class Child:
    """The process of a round; its notes are read all the time."""

    def __init__(self, home: Home, round_: Round, library: Path) -> None:
        environ = {**os.environ, "PYTHONPATH": str(TESTS)}
        self._control: injector.Control | None = None
        if round_.fault != "power":
            home.control.unlink(missing_ok=True)
            self._control = injector.Control(home.control)
            environ |= injector.environment(library, home.disk, home.control)
        self.errors = home.errors
        with self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torture.worker",
                    str(home.folder),
                    msgspec.json.encode(round_),
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environ,
            )
        self.notes: list[Note] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def failed_calls(self) -> int:
        return 0 if self._control is None else self._control.fired

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
        """Whether it has made so many, and lives."""
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
        """Until it has ended; as long as it makes notes it may take its time."""
        while self._reader.is_alive():
            before = len(self.notes)
            self._reader.join(PATIENCE)
            if self._reader.is_alive() and len(self.notes) == before:
                raise self._hanging()
        return self._process.wait()

    def _hanging(self) -> Broken:
        for number in (signal.SIGUSR2, signal.SIGUSR1):
            self.signal(number)
            time.sleep(0.5)
        return Broken(f"it hangs after {self.notes[-3:]}\n{self.errors.read_text()[-9000:]}")

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


async def play(
    home: Home, round_: Round, ledger: Ledger, library: Path, tally: Counter[str]
) -> None:
    """Let a process work under its fault, then check what it left."""
    child = Child(home, round_, library)
    try:
        await _strike(child, round_, home.queues)
        code = child.wait()
    finally:
        child.close()
    ledger.begin_round(round_)
    for note in child.notes:
        ledger.follow(note)
    killed = code == -signal.SIGKILL
    if not killed and (code != 0 or "end" not in child.notes[-1]):
        raise Broken(f"it ended with {code}:\n{child.errors.read_text()[-3000:]}")
    if home.lost.exists():
        shutil.rmtree(home.disk)
        home.lost.rename(home.disk)
        tally["power lost"] += 1
    elif killed:
        tally["killed"] += 1
    tally["notes"] += len(child.notes)
    tally["calls that failed"] += child.failed_calls
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the options are others than before
        await check(home, round_, ledger)


async def _strike(child: Child, round_: Round, disk: Path) -> None:
    """The faults that come from outside of the process."""
    dice = round_.dice("outside")
    if round_.fault == "kill":
        child.wait_for_notes(dice.choice((1, dice.randrange(40), dice.randrange(300))))
        await asyncio.sleep(dice.choice((0.0, dice.uniform(0, 0.05))))
        child.signal(signal.SIGKILL)
    elif round_.fault == "pause":
        for _ in range(dice.randint(1, 3)):
            if not child.wait_for_notes(len(child.notes) + dice.randrange(40)):
                return
            child.signal(signal.SIGSTOP)
            await _nobody_else_may_write(disk, child)
            await asyncio.sleep(dice.uniform(0, 0.3))
            child.signal(signal.SIGCONT)


async def _nobody_else_may_write(disk: Path, child: Child) -> None:
    if _between_owners(child):
        return
    try:
        async with await write_queue(topic=TOPIC, storage_path=str(disk)) as writer:
            await writer.put({"id": "a stranger's"})
    except BucketLocked as exc:
        if str(child.pid) not in str(exc):
            raise Broken(f"the owner is {child.pid}, but the error says {exc}") from exc
    else:
        raise Broken("two processes wrote to one bucket")


def _between_owners(child: Child) -> bool:
    """Whether anybody may take the topic just now: a look opens every bucket, a close ends it."""
    changes = [
        n for n in child.notes if n.get("begin") in ("open", "close") or {"look", "end"} & set(n)
    ]
    return not changes or "look" not in changes[-1]


# What is left


async def check(home: Home, round_: Round, ledger: Ledger) -> None:
    """Open, read everything, and compare."""
    disk, num_buckets = home.queues, round_.num_buckets
    if not (disk / TOPIC / "topic.json").exists():
        if ledger.records:
            raise Broken("the topic is gone")
        return
    try:
        async with await _opened(disk, round_) as writer:
            rows, found = await _read_all(disk, TOPIC, num_buckets)
            ledger.settle_left(found, {tag["name"]: spans(tag) for tag in await writer.tags()})
            ledger.check_rows(rows)
            await _check_tags(disk, num_buckets, ledger)
            report = await writer.verify()
            if not report["ok"] or report["unchecked"]:
                raise Broken(f"verify: {report}")
            ledger.check_group(await _committed(disk, writer, num_buckets))
            await _check_indexes(writer, rows)
        await _check_backups(home, num_buckets, ledger)
    except StorageError as exc:
        raise Broken(f"it cannot be opened or read: {type(exc).__name__}: {exc}") from exc


async def _opened(disk: Path, round_: Round) -> Any:
    """The topic as it was left: retention drops nothing more, and the log may not be kept up."""
    options: dict[str, Any] = dict(plan.NO_LIMITS) if round_.limits else {}
    if round_.logged and round_.dice("check").random() < WITHOUT_LOG:
        options["enable_wal"] = False
    return await write_queue(topic=TOPIC, storage_path=str(disk), backend_options=options or None)


async def check_written(
    home: Home, num_buckets: int, ledger: Ledger, records: list[Record]
) -> None:
    """What somebody else has written is behind all else, once; in which order is his affair."""
    for record in records:
        ledger.records[record["id"]] = record
    rows, spans = await _read_all(home.queues, TOPIC, num_buckets)
    ledger.check_rows(rows)
    added = []
    for bucket, (start, ids) in spans.items():
        known = ledger.shelves[bucket]
        if start != known.start or ids[: len(known.ids)] != known.ids:
            raise Broken(f"bucket {bucket}: what was there has changed")
        added += ids[len(known.ids) :]
        known.settle((start, ids))
        known.flushed = known.end
    if sorted(added) != sorted(record["id"] for record in records):
        raise Broken(f"written were {len(records)} records, {len(added)} came: {sorted(added)}")


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
            raise Broken(f"bucket {bucket}: {start} to {end}, but {len(rows[bucket])} rows")
        spans[bucket] = (start, [row["id"] for row in rows[bucket]])
    return rows, spans


async def _check_tags(disk: Path, num_buckets: int, ledger: Ledger) -> None:
    for name, wanted in ledger.tags.items():
        rows, spans = await _read_all(disk, TOPIC, num_buckets, version=name)
        ledger.check_rows(rows)
        for bucket, (_, ids) in wanted.items():
            if spans[bucket][1] != ids:
                raise Broken(f"tag {name}, bucket {bucket}: {spans[bucket][1]} instead of {ids}")


async def _committed(disk: Path, writer: Any, num_buckets: int) -> dict[int, int]:
    group = disk / TOPIC / "groups" / GROUP
    found = {}
    for bucket in range(num_buckets):
        restores = await writer._topic.bucket(bucket).call(Restores())
        found[bucket] = read_committed(group, bucket, fs.current()).now(restores)
    return found


async def _check_indexes(writer: Any, rows: dict[int, list[Record]]) -> None:
    there = [row for found in rows.values() for row in found]
    if not there:
        return
    for index in await writer.indexes():
        column = index["column"]
        if column in ("n", "id"):
            value = there[len(there) // 2][column]
            found = sorted(row["id"] for row in await writer.lookup(column, value))
            wanted = sorted(row["id"] for row in there if row[column] == value)
        elif column == "text":
            word = there[0]["text"].split()[0]
            hits = await writer.search(text=word, column="text", k=len(there))
            found = sorted(hit["id"] for hit in hits)
            wanted = sorted(row["id"] for row in there if row["text"].startswith(word))
        else:
            continue
        if found != wanted:
            raise Broken(f"the index of {column} finds {found} instead of {wanted}")


async def _check_backups(home: Home, num_buckets: int, ledger: Ledger) -> None:
    """A copy holds all that was acknowledged before it, and nothing that was never there."""
    for name, floors in ledger.backups.items():
        copy, again = home.queues / name, home.folder / "restored"
        if damage := backup.damage_in(copy):
            raise Broken(f"{name}: {damage}")
        backup.restore(copy, again / name)
        rows, spans = await _read_all(again, name, num_buckets)
        ledger.check_rows(rows)
        for bucket, (start, ids) in spans.items():
            least = floors[bucket]
            if start < least[0] or start + len(ids) < least[1]:
                raise Broken(f"{name}, bucket {bucket}: {start} to {start + len(ids)}, not {least}")
            if len(set(ids)) != len(ids):
                raise Broken(f"{name}, bucket {bucket}: doubled rows")
        shutil.rmtree(again)
    ledger.backups.clear()
    for left in home.queues.glob("backup-*"):
        shutil.rmtree(left)
