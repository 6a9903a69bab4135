"""Keeps what was seen of every topic for an hour.

Requests show what the last round saw, so a list of 1,000 topics takes no longer than a short one.
Another process reads the files, so that requests do not wait for it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any, TypeAlias

import msgspec

from persisting.topic.group_admin import GroupProgress, Span
from persisting.topic.inspect import Description, distinct_owners
from persisting.ui.looks import Looked, Message, Names, look_at
from persisting.ui.owners import OwnedBucket
from persisting.ui.series import Series
from persisting.ui.storage_view import TopicsView

log = logging.getLogger("persisting")

Ask: TypeAlias = "Callable[[str, bool], dict[int, OwnedBucket]]"

_RATE_SECONDS = 60.0
_MAX_SERIES = 256
"""Groups times buckets whose lag is kept for each topic."""
_NICE = 3
_AT_ONCE = 20
"""Topics that are noted before requests get a turn."""


@dataclass
class History:
    """The numbers of the last hour."""

    records: Series = field(default_factory=Series)
    """All records ever accepted: the sum of the end offsets."""
    size: Series = field(default_factory=Series)
    unflushed: Series = field(default_factory=Series)
    flush_time: Series = field(default_factory=Series)
    """Seconds that a flush took, on average of those since the point before."""
    flushes: dict[int, OwnedBucket] = field(default_factory=dict)
    """By bucket, what its owner said last about its flushes."""
    lag: dict[str, Series] = field(default_factory=dict)
    bucket_lag: dict[tuple[str, int], Series] = field(default_factory=dict)


@dataclass
class Sample:
    """A topic as the last round saw it."""

    description: Description | None
    """None if the topic cannot be opened."""
    problem: str | None
    spans: dict[int, Span]
    """By bucket, the offsets of its acknowledged records, as far as they are in files."""
    owned: dict[int, OwnedBucket]
    """Buckets whose owner was asked for what is in no file yet."""
    history: History
    looked: float
    """When its files were read; since then they have not changed."""
    time: float

    @property
    def ends(self) -> dict[int, int]:
        """By bucket, the offset after the last acknowledged record."""
        found = {bucket: span.end for bucket, span in self.spans.items()}
        for bucket, owned in self.owned.items():
            found[bucket] = max(found.get(bucket, 0), owned.end)
        return found

    @property
    def rows(self) -> int:
        """Acknowledged records, flushed or not."""
        ends = self.ends
        return sum(ends[bucket] - span.start for bucket, span in self.spans.items())

    @property
    def unflushed(self) -> dict[int, int]:
        """By bucket, the acknowledged records that are not in its table yet."""
        ends = self.ends
        buckets = () if self.description is None else self.description.buckets
        return {b.bucket: max(0, ends.get(b.bucket, 0) - b.end_offset) for b in buckets}

    @property
    def rate(self) -> float:
        """Records per second over the last minute."""
        points = self.history.records.points(self.time - _RATE_SECONDS)
        if len(points) < 2:
            return 0.0
        first, last = points[0], points[-1]
        return max(0.0, last.value - first.value) / max(1.0, last.time - first.time)

    @property
    def bytes(self) -> int:
        return 0 if self.description is None else self.description.bytes

    @property
    def groups(self) -> list[GroupProgress]:
        return [] if self.description is None else self.description.groups

    @property
    def owners(self) -> list[dict[str, Any]]:
        return [] if self.description is None else distinct_owners(self.description.buckets)

    @property
    def lag(self) -> int:
        return max((group.lag for group in self.groups), default=0)


class Sampler:
    """Takes the messages of the process that samples the topics."""

    def __init__(self, view: TopicsView, seconds: float, ask: Ask) -> None:
        """``ask`` returns what the owners of a topic say; it blocks. Its second argument says
        whether all of them are asked, or those whose files may lack acknowledged records."""
        self._view, self._seconds, self._ask = view, seconds, ask
        self._names: list[str] | None = None
        self._samples: dict[str, Sample] = {}
        self._seen: set[str] = set()
        """Topics about which this round has said something."""
        self._problem: str | None = None
        self._stop, self._changing = threading.Event(), threading.Lock()
        self._recording = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="persisting-ui-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and its process; blocks until they have ended."""
        self._stop.set()
        with self._changing:
            if self._process is not None:
                self._process.kill()
        self._thread.join(10)

    def names(self) -> list[str] | None:
        """Return the topics of the last round, None before the first."""
        return self._names

    def samples(self) -> dict[str, Sample]:
        """Return the topics of the last round; during the first round those it has seen."""
        return dict(self._samples)

    def sample(self, topic: str) -> Sample | None:
        return self._samples.get(topic)

    def look_again(self, topic: str) -> Sample:
        """Sample one topic now, as after a change. Blocking."""
        self._view.check(topic)  # raises NoSuchTopic
        sample = self._noted(look_at(self._view, topic))
        self._record(sample)
        return sample

    def take(self, message: Message) -> None:
        """Note what a round has seen."""
        if isinstance(message, Names):
            self._names = message.names
            self._seen.clear()
        elif isinstance(message, Looked):
            self._seen.add(message.topic)
            sample = self._noted(message)
            if sample.looked == message.time:  # no later sample is known
                self._record(sample)
        elif message.problem is not None:
            if message.problem != self._problem:
                log.warning("the console cannot read the topics: %s", message.problem)
            self._problem = message.problem
        else:
            self._problem = None
            self._end_round()

    def _end_round(self) -> None:
        """Note the time for topics that have not changed, and forget deleted ones."""
        names = self._names or []
        for gone in set(self._samples) - set(names):
            del self._samples[gone]
        for number, name in enumerate(names):
            if self._stop.is_set():
                return
            last = self._samples.get(name)
            if last is not None and name not in self._seen:
                sample = replace(last, time=time.time(), owned=self._owned(last, name))
                self._samples[name] = sample
                self._record(sample)
            if number % _AT_ONCE == 0:
                self._stop.wait(0.001)

    def _noted(self, looked: Looked) -> Sample:
        """Keep a sample, unless a later one is known."""
        name, last = looked.topic, self._samples.get(looked.topic)
        if last is not None and last.looked > looked.time:
            return last
        if last is None or last.problem != looked.problem:
            if looked.description is None:
                log.warning("the console cannot read a topic: %s", looked.problem)
        sample = Sample(
            looked.description,
            looked.problem,
            looked.spans,
            {},
            History() if last is None else last.history,
            looked.time,
            time.time(),
        )
        sample.owned = self._owned(sample, name, has_flushed=looked.has_flushed)
        self._samples[name] = sample
        return sample

    def _record(self, sample: Sample) -> None:
        """Add a sample to its history; requests do so too, after a change."""
        with self._recording:
            _record(sample)

    def _owned(
        self, sample: Sample, name: str, *, has_flushed: bool = False
    ) -> dict[int, OwnedBucket]:
        """Ask the owners of a topic, all of them if it was flushed; of a topic without an owner,
        none."""
        return self._ask(name, has_flushed) if sample.owners else {}

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._follow()
            except Exception:
                log.exception("the console failed to sample the topics; retrying")
            self._stop.wait(self._seconds)

    def _follow(self) -> None:
        """Start the process that samples the topics, and take its messages until it ends."""
        with self._changing:
            if self._stop.is_set():
                return
            self._process = process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "persisting.ui.sample_worker",
                    self._view.place,
                    str(self._seconds),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C stops the console, which ends this process
            )
        decoder = msgspec.msgpack.Decoder(Message)
        try:
            with suppress(OSError):
                mine = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, process.pid, mine + _NICE)
            assert process.stdout is not None
            while (body := _frame(process.stdout)) is not None:
                self.take(decoder.decode(body))
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if not self._stop.is_set():
            log.warning(
                "the process that samples the topics exited with status %d; restarting it",
                process.returncode,
            )


def _frame(source: IO[bytes]) -> bytes | None:
    """Return the next message of a process, None if it has ended."""
    header = source.read(4)
    size = int.from_bytes(header, "big")
    body = source.read(size)
    return body if len(header) == 4 and len(body) == size else None


def _record(sample: Sample) -> None:
    """Add a sample to its history."""
    history, now = sample.history, sample.time
    if sample.problem is not None:
        return  # its numbers are unknown
    history.records.add(now, sum(sample.ends.values()))
    history.size.add(now, sample.bytes)
    history.unflushed.add(now, sum(sample.unflushed.values()))
    _record_flushes(history, sample.owned, now)
    groups = {group.group for group in sample.groups}
    for gone in set(history.lag) - groups:
        del history.lag[gone]
    for key in [key for key in history.bucket_lag if key[0] not in groups]:
        del history.bucket_lag[key]
    for group in sample.groups:
        history.lag.setdefault(group.group, Series()).add(now, group.lag)
        for place in group.buckets:
            key = group.group, place.bucket
            if key in history.bucket_lag or len(history.bucket_lag) < _MAX_SERIES:
                history.bucket_lag.setdefault(key, Series()).add(now, place.lag)


def _record_flushes(history: History, owned: dict[int, OwnedBucket], now: float) -> None:
    """Add the average of the flushes since the owners were asked before."""
    count, seconds = 0, 0.0
    for bucket, state in owned.items():
        if state.flush_seconds is None:
            continue
        last = history.flushes.get(bucket)
        history.flushes[bucket] = state
        if last is None:
            continue  # when these flushes took place is not known
        if state.flushes < last.flushes:  # of a new owner
            last = OwnedBucket(0, 0, 0, 0, 0.0)
        count += state.flushes - last.flushes
        seconds += state.flush_seconds - (last.flush_seconds or 0.0)
    if count > 0:
        history.flush_time.add(now, max(0.0, seconds) / count)
