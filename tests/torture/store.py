"""Owners of a topic in an object store: killed, paused, competing, over a proxy that delays, holds,
refuses and loses requests. Afterwards every acknowledged record must be in the tables, once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lance
from support.crash.checks import PromiseBroken
from support.fault_proxy import FaultProxy
from support.object_stores import SeaweedFS, fresh_prefix, storage_options, url

from persisting.store.object_store import open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from torture.store_owner import BUCKETS, LEASE, PRODUCERS, give_columns

KINDS = ("pause", "pause", "kill", "pause and kill", "duel", "network")
PATIENCE = 180.0
"""The machine may stall for a minute; a process that gives up ends a wait immediately."""


class _Owner:
    """A process of :mod:`torture.store_owner`."""

    def __init__(self, folder: Path, name: str, arguments: list[str]) -> None:
        self._notes, self._errors = folder / f"{name}.notes", folder / f"{name}.errors"
        self.name = name
        port, prefix, *settings = arguments
        command = [sys.executable, "-m", "torture.store_owner"]
        with self._errors.open("wb") as errors:
            self.child = subprocess.Popen(
                [*command, port, prefix, str(self._notes), name, *settings],
                stdout=errors,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    @property
    def notes(self) -> list[dict[str, Any]]:
        if not self._notes.exists():
            return []
        return [json.loads(line) for line in self._notes.read_bytes().split(b"\n")[:-1]]

    def count(self, event: str) -> int:
        return sum(note["event"] == event for note in self.notes)

    def wait_for(self, event: str, count: int = 1, seconds: float = PATIENCE) -> bool:
        """Wait until the process has noted this; return whether it has."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.child.poll() is None:
            if self.count(event) >= count:
                return True
            time.sleep(0.02)
        return self.count(event) >= count

    def pause(self) -> None:
        self.child.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.child.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()

    def report(self) -> str:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGUSR1)  # print the stacks
            time.sleep(0.5)
        last = [note for note in self.notes if note["event"] != "ack"][-5:]
        return f"{self.name}: {last} {self._errors.read_text()[-2000:]}"


class Contest:
    """One topic, the processes that want to own it, and the proxy between them and the store."""

    def __init__(self, server: SeaweedFS, folder: Path, seed: int, mutation: str = "") -> None:
        self._server, self._folder, self._seed = server, folder, seed
        self._settings = [f"mutation={mutation}"] if mutation else []
        self.chance = random.Random(f"store/{seed}")
        self.proxy = FaultProxy(server.port)
        self.proxy.random.seed(seed)
        self._prefix = fresh_prefix()
        self.owners: list[_Owner] = []

    def start(self, *settings: str) -> _Owner:
        arguments = [str(self.proxy.port), self._prefix, *settings, *self._settings]
        name = f"o{len(self.owners)}-{self._seed}"
        self.owners.append(_Owner(self._folder, name, arguments))
        return self.owners[-1]

    def give_columns(self) -> None:
        """Own all buckets for a moment, so that their tables have columns."""
        options = StorageOptions(storage_options(self._server.port))
        asyncio.run(give_columns(open_store(parse(url(self._prefix)), options)))

    def finish(self, tally: Counter[str]) -> None:
        """Kill all owners in the middle of their work, open the topic once more, and check it."""
        for owner in self.owners:
            owner.kill()
        self.proxy.heal()
        last = self.start("close")
        if not last.wait_for("closed"):
            raise PromiseBroken(f"the topic cannot be opened again: {last.report()}")
        last.child.wait(PATIENCE)
        self._check(tally)

    def stop(self) -> None:
        for owner in self.owners:
            if owner.child.poll() is None:
                owner.kill()
        self.proxy.stop()

    def _check(self, tally: Counter[str]) -> None:
        rows: list[dict[str, Any]] = []
        for bucket in range(BUCKETS):
            stored = self._rows_of(bucket)
            last: dict[str, int] = {}
            for row in stored:
                if last.get(row["who"], -1) > row["n"]:
                    raise PromiseBroken(f"{row['id']} is out of order in bucket {bucket}")
                last[row["who"]] = row["n"]
            rows += stored
        counts = Counter(row["id"] for row in rows)
        notes = [note for owner in self.owners for note in owner.notes]
        acknowledged = [name for note in notes if note["event"] == "ack" for name in note["ids"]]
        lost = [name for name in acknowledged if not counts[name]]
        duplicated = [name for name, count in counts.items() if count > 1]
        if lost or duplicated:
            raise PromiseBroken(
                f"{len(acknowledged)} acknowledged, {len(lost)} lost {lost[:3]}, "
                f"{len(duplicated)} duplicated {duplicated[:3]}"
            )
        lists = Counter(row["list"] for row in rows if row["list"])
        if torn := [name for name, count in lists.items() if count != 4]:
            raise PromiseBroken(f"lists are stored in part: {torn[:3]}")
        tally["acknowledged"] += len(acknowledged)
        for event in ("owner", "refused", "flush refused", "failed", "maintained"):
            tally[event] += sum(note["event"] == event for note in notes)

    def _rows_of(self, bucket: int) -> list[dict[str, Any]]:
        root = f"{url(self._prefix)}/bucket_{bucket}/data.lance"
        dataset = lance.dataset(root, storage_options=self._server.options())
        rows: list[dict[str, Any]] = dataset.to_table().to_pylist()
        return rows


@contextmanager
def serving(folder: Path) -> Iterator[SeaweedFS]:
    server = SeaweedFS(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def run(
    server: SeaweedFS,
    folder: Path,
    seed: int,
    tally: Counter[str],
    act: Callable[[Contest], str],
    mutation: str = "",
) -> None:
    """Have ``act`` start and disturb owners of a new topic, and check what its tables hold."""
    contest = Contest(server, folder, seed, mutation)
    try:
        kind = act(contest)
        contest.finish(tally)
    except PromiseBroken as exc:
        reports = "\n".join(owner.report() for owner in contest.owners)
        raise PromiseBroken(f"seed {seed}: {exc}\n{reports}") from None
    finally:
        contest.stop()
    tally[kind] += 1
    tally["rounds"] += 1


# Random rounds


def random_round(contest: Contest) -> str:
    """Kill, pause or disturb owners at random; return the kind of the round."""
    chance, proxy = contest.chance, contest.proxy
    kind = chance.choice(KINDS)
    proxy.delay = chance.choice((0.0, 0.0, 0.01))
    first = contest.start()
    first.wait_for("ack", 5)
    if kind == "network" or chance.random() < 0.4:
        _disturb(proxy, chance)
    time.sleep(chance.uniform(0.0, 0.8))
    if kind == "network":
        first.wait_for("flushed", first.count("flushed") + chance.randint(3, 8), seconds=20)
        return kind
    if kind == "kill":
        first.kill()
    else:
        first.pause()
    second = contest.start()
    if kind == "duel":
        contest.start()
        time.sleep(4 * LEASE)
    second.wait_for("ack", 5, seconds=30)
    second.wait_for("flushed", chance.choice((0, 2, 5)), seconds=8)
    if kind == "pause and kill":
        second.kill()
        second = contest.start()
        second.wait_for("ack", 3, seconds=30)
        second.wait_for("flushed", chance.choice((0, 2)), seconds=8)
    if kind != "kill":
        first.go_on()
        time.sleep(chance.uniform(0.2, 1.0))
        if chance.random() < 0.4:
            second.pause()
            contest.start().wait_for("ack", 3, seconds=30)
            second.go_on()
            time.sleep(0.4)
    time.sleep(0.3)
    return kind


def _disturb(proxy: FaultProxy, chance: random.Random) -> None:
    proxy.add("PUT", share=0.03, hold=chance.choice((0.3, 2 * LEASE, 3.0)))
    proxy.add("PUT", share=0.03, lose=True)
    proxy.add("PUT", share=0.02, drop=True)
    proxy.add("", share=0.02, answer=chance.choice((500, 503, 429)))
    proxy.add("PUT-if", share=0.02, answer=409)


# Rounds that one part of the protocol decides, by the mutation that leaves it out


def paused_owner_flushes_late(contest: Contest) -> str:
    """An owner is paused with unflushed records, and flushes when another has stored them."""
    contest.give_columns()
    first = contest.start("lazy")
    first.wait_for("ack", 20)
    first.pause()
    second = contest.start()
    second.wait_for("flushed", 3)
    first.go_on()
    first.wait_for("ended", seconds=30)
    return "late flush"


def paused_owner_puts_late(contest: Contest) -> str:
    """An owner is paused, and puts when another has taken over and cleaned up its log."""
    first = contest.start("lazy")
    first.wait_for("ack", 20)
    first.pause()
    second = contest.start()
    second.wait_for("ack", 5)
    acknowledged = first.count("ack")
    first.go_on()
    # Up to PRODUCERS puts were stored before the pause; with the whole protocol it ends now.
    first.wait_for("ack", acknowledged + 4 * PRODUCERS, seconds=10)
    return "late put"


def owner_is_killed_after_releases(contest: Contest) -> str:
    """An owner releases slots of its log, and is killed."""
    first = contest.start()
    first.wait_for("flushed", 6)
    time.sleep(LEASE)  # until a heartbeat has deleted them
    first.wait_for("ack", first.count("ack") + 20)
    first.kill()
    return "release"


def new_owner_is_killed_during_recovery(contest: Contest) -> str:
    """A new owner is killed before it has brought the records of the old log into the tables."""
    first = contest.start("lazy")
    first.wait_for("ack", 20)
    first.kill()
    held = contest.proxy.add("GET", also="/slots/00000000000000000000", hold=30.0)
    second = contest.start("lazy")
    held.reached.wait(PATIENCE)
    time.sleep(0.3)
    second.kill()
    contest.proxy.heal()
    return "killed during recovery"


def owner_is_killed_with_slots_under_way(contest: Contest) -> str:
    """An owner is killed while slots are stored, and one before them is not."""
    first = contest.start("lazy", "patient")
    first.wait_for("ack", 20)
    proxy = contest.proxy
    for _ in range(100):
        let_go = threading.Event()
        held = proxy.add("PUT-if-absent", also="/slots/", until=let_go, times=1)
        held.reached.wait(PATIENCE)
        proxy.reset_counts()
        time.sleep(0.5)
        if proxy.counts["PUT-if-absent"]:  # a slot after the held one
            first.wait_for("ack", first.count("ack") + 1, seconds=5)  # there must be none
            first.kill()
            break
        let_go.set()
    return "slots under way"


def commit_lands_late(contest: Contest) -> str:
    """A commit of the table arrives after the owner has given up waiting for its answer."""
    first = contest.start()
    first.wait_for("flushed", 3)
    held = contest.proxy.add("PUT-if-absent", also="/_versions/", hold=2.5, times=2)
    held.reached.wait(PATIENCE)
    first.wait_for("flushed", first.count("flushed") + 3, seconds=30)
    return "late commit"


def paused_owner_flushes_after_cleaning(contest: Contest) -> str:
    """An owner is paused, and flushes when another has removed all old versions."""
    contest.give_columns()
    first = contest.start("lazy")
    first.wait_for("ack", 20)
    first.pause()
    second = contest.start("clean")
    second.wait_for("maintained", 12)
    first.go_on()
    first.wait_for("ended", seconds=30)
    return "late flush after cleaning"


DECIDED: dict[str, Callable[[Contest], str]] = {
    "acknowledged out of order": owner_is_killed_with_slots_under_way,
    "claim after all slots": owner_is_killed_with_slots_under_way,
    "fence cleaned up": paused_owner_flushes_after_cleaning,
    "no fence": paused_owner_flushes_late,
    "claims deleted": paused_owner_puts_late,
    "release unannounced": owner_is_killed_after_releases,
    "own log immediately": new_owner_is_killed_during_recovery,
}
"""The round that each mutation must break."""


async def torture(seed: int, seconds: float, tally: Counter[str], most: int | None = None) -> None:
    """Run random rounds with increasing seeds until the time is over."""
    end = time.monotonic() + seconds
    with (
        tempfile.TemporaryDirectory(prefix="torture-store-") as name,
        serving(Path(name) / "server") as server,
    ):
        for number in range(most or 1 << 30):
            if time.monotonic() > end:
                return
            place = Path(name) / f"round-{number}"
            place.mkdir()
            await asyncio.to_thread(run, server, place, seed + number, tally, random_round)
