"""The steps of the demo. It prints what happens and checks every claim."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec

from persisting.demo import report_charts
from persisting.demo.producer import NODES, TOPIC, Acknowledged
from persisting.demo.trajectories import DIMENSIONS, TASKS, embedding, trajectories
from persisting.errors import InvalidArgument, StorageError
from persisting.queue import read_queue, write_queue

CURATED = "curated"
MARKER = ".persisting-demo"
"""Marks a folder that the demo created and may remove."""

_PRODUCERS = 3
_SECONDS = 6.0
_KILL_AFTER = 3.0
_BIN = 0.25
_MORE = 500


class ClaimFailed(StorageError):
    """A claim of the demo did not hold."""


@dataclass(frozen=True)
class _Node:
    """A running storage node."""

    process: subprocess.Popen[str]
    address: str
    metrics: str
    """The address of its metrics."""


@dataclass
class Story:
    """One run of the demo in a folder."""

    folder: Path
    started: float = field(default_factory=time.monotonic)
    facts: list[tuple[str, str]] = field(default_factory=list)
    killed_at: float = 0.0
    flushes: Counter[str] = field(default_factory=Counter)

    @property
    def storage(self) -> str:
        return str(self.folder / "queues")

    # Output

    def part(self, title: str) -> None:
        print(f"\n{_bold(title)}", flush=True)

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def claim(self, holds: bool, what: str) -> None:
        """Print a claim, or raise if it does not hold."""
        if not holds:
            raise ClaimFailed(f"the demo failed; this is not true: {what}")
        self.say(f"{_green('✓')} {what}")

    def fact(self, name: str, value: str) -> None:
        self.facts.append((name, value))

    # 1 and 2: producers, a kill, and recovery

    async def produce(self) -> None:
        """Put through a cluster of storage nodes and kill one of them."""
        self.part("1. Three agents put their trajectories into one durable topic over Pulsing")
        self.say(f"Records have text, a score, a vector of {DIMENSIONS} and nested steps. Three")
        self.say("storage nodes, each 'persisting serve', own the topic's 4 buckets. A put returns")
        self.say("when its records are on disk.")
        notes = self.folder / "acknowledged.jsonl"
        with contextlib.ExitStack() as stack:
            nodes = [await self._node(stack, 1)]
            for number in range(2, NODES + 1):
                nodes.append(await self._node(stack, number, nodes[0].address))
            agents = [
                self._agent(stack, number, nodes[0].address, notes)
                for number in range(1, _PRODUCERS + 1)
            ]
            await self._until_killed(nodes, agents)
        acks = _read(notes)
        total = sum(ack.count for ack in acks)
        lasting = max(ack.time for ack in acks) - min(ack.time for ack in acks)
        slowest = max(ack.seconds for ack in acks)
        self.say(f"{total:,} trajectories were acknowledged, {total / lasting:,.0f} per second")
        self.say(
            f"the longest put took {slowest:.2f} s: it waited for the buckets of the killed node"
        )
        self.fact("acknowledged", f"{total:,} records, {total / lasting:,.0f} per second")
        self.fact("longest put", f"{slowest:.2f} s, during the kill")

    async def _node(
        self, stack: contextlib.ExitStack, number: int, seed: str | None = None
    ) -> _Node:
        """Start a storage node and wait until it serves."""
        joining = () if seed is None else ("--seed", seed)
        process = self._started(
            stack,
            f"node-{number}",
            "persisting.cli",
            *("serve", "-s", self.storage, "--metrics-port", "0", *joining),
        )
        address, *rest = (await _line(process, "serving")).split()
        return _Node(process, address, rest[-1])

    def _agent(
        self, stack: contextlib.ExitStack, number: int, seed: str, notes: Path
    ) -> subprocess.Popen[str]:
        name = f"agent-{number}"
        arguments = (name, seed, self.storage, str(notes), str(_SECONDS))
        return self._started(stack, name, "persisting.demo.producer", *arguments)

    def _started(
        self, stack: contextlib.ExitStack, name: str, module: str, *arguments: str
    ) -> subprocess.Popen[str]:
        """Start a Python module as a process, which is killed at the end if it still runs."""
        log = stack.enter_context((self.folder / f"{name}.log").open("w"))
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the demo, which stops them
        )

        def stop() -> None:
            process.kill()
            process.communicate()

        stack.callback(stop)
        return process

    async def _until_killed(self, nodes: list[_Node], agents: list[subprocess.Popen[str]]) -> None:
        for agent in agents:
            await _line(agent, "putting")
        await asyncio.sleep(_KILL_AFTER)
        victim, *survivors = nodes[1], nodes[0], *nodes[2:]
        victim.process.send_signal(signal.SIGKILL)
        self.killed_at = time.time()
        self.say(_red("kill -9: a storage node dies in the middle of puts, with its buckets open"))
        for agent in agents:
            await _line(agent, "done")
            await asyncio.to_thread(agent.wait, 60)
        for node in survivors:
            self.flushes.update(await asyncio.to_thread(_flushes, node.metrics))
            node.process.send_signal(signal.SIGTERM)
        codes = [await asyncio.to_thread(node.process.wait, 60) for node in survivors]
        self.claim(not any(codes), "the other nodes stop cleanly at SIGTERM")

    async def recovered(self) -> None:
        """Check that every acknowledged record is stored exactly once."""
        self.part("2. Nothing acknowledged is lost: the others replayed the log of the killed node")
        acks = _read(self.folder / "acknowledged.jsonl")
        acknowledged = {
            f"{ack.agent}-{number:06d}"
            for ack in acks
            for number in range(ack.first, ack.first + ack.count)
        }
        reader = await read_queue(topic=TOPIC, storage_path=self.storage)
        async with reader:
            found = Counter([record["id"] async for record in reader.get_stream()])
        self.claim(
            acknowledged <= set(found),
            f"all {len(acknowledged):,} acknowledged trajectories are stored",
        )
        self.claim(max(found.values()) == 1, "none is stored twice")
        count = f"{len(acknowledged):,}"
        self.fact("after the kill", f"{count} of {count} stored, none twice")

    # 3: consumers

    async def consume(self) -> None:
        """Read the topic with two members of a group."""
        self.part("3. A consumer group reads in parallel: each record goes to one member")
        counts, seen = [0, 0], Counter[str]()

        async def member(number: int) -> None:
            reader = await read_queue(topic=TOPIC, storage_path=self.storage, group="trainers")
            async with reader:
                while True:
                    batch = await reader.get(limit=500, wait=True, timeout=1.0)
                    seen.update(record["id"] for record in batch)
                    counts[number] += len(batch)
                    await reader.commit()
                    if not batch and (await reader.stats())["group_lag"] == 0:
                        return

        started = time.monotonic()
        await asyncio.gather(member(0), member(1))
        rate = sum(counts) / (time.monotonic() - started)
        self.say(f"one read {counts[0]:,}, the other {counts[1]:,}; {rate:,.0f} records per second")
        self.claim(set(seen.values()) == {1}, "no record was delivered twice")
        self.fact("consumer group", f"{counts[0]:,} and {counts[1]:,} records, none twice")

    # 4: the pipeline

    async def pipeline(self) -> None:
        """Derive a curated topic incrementally, and a training split."""
        self.part("4. Spark derives a curated topic from the raw one, and a training split")
        self.say("(Java comes from PyPI if the machine has none; Spark takes seconds to start)")
        spark = await asyncio.to_thread(_spark, self.folder)
        try:
            await self._pipeline(spark)
        finally:
            await asyncio.to_thread(spark.stop)

    async def _pipeline(self, spark: Any) -> None:
        from persisting.spark import jobs

        def curate() -> Any:
            return jobs.incremental(
                spark,
                self.folder / "queues" / TOPIC,
                self.folder / "queues" / CURATED,
                _curated,
                vectors={"embedding": DIMENSIONS},
                quiet=True,
            )

        first = await asyncio.to_thread(curate)
        self.say(f"first run:  {first.rows:,} rows read, {first.written:,} kept (score above 0.5)")
        writer = await write_queue(topic=TOPIC, storage_path=self.storage)
        async with writer:
            await writer.put(trajectories("agent-4", 0, _MORE))
        second = await asyncio.to_thread(curate)
        self.say(f"{_MORE} more trajectories arrive; second run: {second.rows:,} rows read")
        self.claim(second.rows == _MORE, "each run processes only new records, exactly once")

        def split() -> dict[str, int]:
            parts = jobs.split_topic(spark, self.folder / "queues" / CURATED, key="id", tag="v1")
            return {name: part.count() for name, part in parts.items()}

        parts = await asyncio.to_thread(split)
        self.say("split by a hash of the id, pinned by the tag 'v1': " + _counts(parts))
        self.claim(
            sum(parts.values()) == first.written + second.written,
            "together the parts are the whole topic",
        )
        self.fact("Spark", f"{first.rows:,} + {second.rows:,} rows read, {_counts(parts)}")

    # 5: search and time travel

    async def look_back(self) -> None:
        """Search, and read an earlier version."""
        self.part("5. Search and time travel")
        task = TASKS[1]
        near = embedding(1, random.Random(7))
        reader = await read_queue(topic=CURATED, storage_path=self.storage)
        async with reader:
            hits = await reader.search(near, k=3, columns=["id", "task", "score"])
            for hit in hits:
                self.say(f"{hit['_distance']:7.3f}  {hit['id']}  {hit['task']}  {hit['score']}")
            self.claim(
                all(hit["task"] == task for hit in hits), f"the nearest vectors belong to {task!r}"
            )
            words = await reader.search(text="race bucket", column="text", k=1, columns=["text"])
            self.say(f"text search for 'race bucket': {words[0]['text']!r}")
            before = (await reader.stats())["total_count"]
        writer = await write_queue(topic=CURATED, storage_path=self.storage)
        async with writer:
            await writer.put({**_kept(trajectories("late", 0, 1))[0], "score": 1.0})
        reader = await read_queue(topic=CURATED, storage_path=self.storage)
        async with reader:
            now = (await reader.stats())["total_count"]
            then = (await reader.get_arrow(version="v1")).num_rows
        self.say(f"after one more put the topic has {now:,} records")
        self.claim(then == before, f"the tag 'v1' still has {before:,}, and always will")
        self.fact("at tag v1", f"{then:,} records; now {now:,}")

    # 6: charts

    def draw(self) -> None:
        """Draw throughput and flush latency."""
        self.part("6. Throughput and latency")
        throughput = _throughput(_read(self.folder / "acknowledged.jsonl"), self.killed_at)
        print("  acknowledged records per second")
        for line in report_charts.bars(throughput):
            print("  " + line)
        latency = report_charts.Series(
            "Flushes to the table, by duration",
            "flushes",
            [f"≤ {name} s" for name in self.flushes],
            list(self.flushes.values()),
        )
        print("  flushes to the table, by duration (scraped from the two surviving nodes)")
        top = max(latency.values, default=1) or 1
        for name, value in zip(latency.names, latency.values, strict=True):
            if value:
                print(f"  {name:>12}  {'█' * max(1, round(40 * value / top))} {value:,.0f}")
        report = self.folder / "report.html"
        report_charts.page(report, "Persisting: demo", self.facts, [throughput, latency])
        self.say(f"report: {report}")


async def run(folder: Path) -> None:
    """Run the demo in ``folder`` and leave its topics there."""
    for name in ("pulsing", "pyspark"):
        if find_spec(name) is None:
            raise StorageError(f"the demo needs {name}: pip install 'persisting[all]'")
    _create_empty(folder)
    logging.getLogger("persisting").setLevel(logging.ERROR)
    story = Story(folder)
    await story.produce()
    await story.recovered()
    await story.consume()
    await story.pipeline()
    await story.look_back()
    story.draw()
    place = f"-s {story.storage}"
    print(f"\n{_bold('Every claim held')}, in {time.monotonic() - story.started:.0f} s. Try:")
    for line in (
        f"persisting topics {place}",
        f"persisting describe {TOPIC} {place}",
        f"persisting tail {CURATED} {place} -n 3",
        f'persisting search {CURATED} {place} --text "race bucket" --column text -k 3',
        f"persisting groups {TOPIC} {place}",
        f"persisting verify {TOPIC} {place}",
    ):
        print(f"  {line}")
    print(f"Or look at it in a browser:\n  persisting ui {place}")


def _create_empty(folder: Path) -> None:
    """Create the folder empty; a folder of an earlier demo is removed."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise InvalidArgument(
                f"{folder} exists and was not created by the demo; choose another --output"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


async def _line(process: subprocess.Popen[str], word: str) -> str:
    """Return what a process prints after ``word``."""
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 60)
    first, _, rest = line.strip().partition(" ")
    if first != word:
        raise ClaimFailed(
            f"a process ended early (it printed {line!r}); see the *.log files in the demo's folder"
        )
    return rest


def _read(notes: Path) -> list[Acknowledged]:
    decoder = msgspec.json.Decoder(Acknowledged)
    return decoder.decode_lines(notes.read_bytes())


def _flushes(metrics: str) -> Counter[str]:
    """Return the number of flushes by upper bound of their duration."""
    with urlopen(metrics, timeout=10) as answer:
        text = answer.read().decode()
    found: Counter[str] = Counter()
    below: Counter[str] = Counter()
    pattern = r'persisting_flush_duration_seconds_bucket\{bucket="(\d+)",le="([^"]+)",.*\} (\S+)'
    for bucket, bound, count in re.findall(pattern, text):
        found[bound] += int(float(count)) - below[bucket]
        below[bucket] = int(float(count))
    return found


def _throughput(acks: list[Acknowledged], killed_at: float) -> report_charts.Series:
    start = min(ack.time for ack in acks)
    bins = [0.0] * (int((max(ack.time for ack in acks) - start) / _BIN) + 1)
    for ack in acks:
        bins[int((ack.time - start) / _BIN)] += ack.count / _BIN
    killed = max(0, min(len(bins) - 1, int((killed_at - start) / _BIN)))
    names = [f"{place * _BIN:g} s" for place in range(len(bins))]
    return report_charts.Series("Acknowledged records per second", "records/s", names, bins, killed)


def _spark(folder: Path) -> Any:
    from persisting.spark import session

    return session("persisting demo", master="local[2]", conf={"spark.sql.shuffle.partitions": 2})


def _curated(raw: Any) -> Any:
    """Select the good trajectories of a DataFrame and count their tokens."""
    return raw.where("score > 0.5").selectExpr(
        "id",
        "task",
        "text",
        "score",
        "embedding",
        "aggregate(steps, 0L, (sum, step) -> sum + step.tokens) AS tokens",
    )


def _kept(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert raw records to curated ones, as :func:`_curated` does."""
    names = ("id", "task", "text", "score", "embedding")
    return [
        {
            **{name: record[name] for name in names},
            "tokens": sum(s["tokens"] for s in record["steps"]),
        }
        for record in records
    ]


def _counts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in parts.items())


def _styled(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text


def _bold(text: str) -> str:
    return _styled(text, "1")


def _green(text: str) -> str:
    return _styled(text, "32")


def _red(text: str) -> str:
    return _styled(text, "31")
