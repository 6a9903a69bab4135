"""The base of the state machines that run any sequence of operations on a bucket."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine

from persisting.queue import BucketLocked
from support.buckets import Bucket, Kind


class BucketMachine(RuleBasedStateMachine):
    """Owns a bucket in a folder of its own, and an event loop to call it in."""

    kind: Kind
    backend: Any

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.bucket = Bucket(self.kind, Path(self.folder.name))

    def open(self) -> None:
        """Open the bucket as ``backend``."""
        raise NotImplementedError

    def teardown(self) -> None:
        self.run(self.bucket.close())
        self.loop.close()
        self.folder.cleanup()

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def drop_and_reopen(self) -> None:
        """Drop the backend without closing it, as if the process had died, and open the bucket."""
        self.bucket = Bucket(self.kind, self.bucket.folder)
        del self.backend
        gc.collect()
        self.open_when_released()

    def open_when_released(self) -> None:
        """Open the bucket once no background flush of an earlier backend holds it."""
        while True:
            try:
                return self.open()
            except BucketLocked:
                time.sleep(0.005)


def machine(
    base: type[BucketMachine], kind: Kind, *, examples: int, steps: int, fixed: bool = True
) -> type:
    """Return a test case of ``base`` on ``kind``."""
    made = type(f"{base.__name__}_{kind.name}", (base,), {"kind": kind})
    # Outside nightly runs, report a failure without shrinking, which takes minutes.
    phases = set(Phase) - ({Phase.shrink, Phase.explain} if fixed else set())
    made.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=steps, derandomize=fixed, phases=phases
    )
    return made.TestCase
