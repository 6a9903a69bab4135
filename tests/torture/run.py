"""Run the torture program.

    make torture TORTURE_ARGS="--seconds 600 --seed 7"

Every part draws its work and its faults from a seed, which is printed if a promise is broken. The
same seed gives the same work and the same faults, as far as the operating system allows.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from support.crash.checks import PromiseBroken

from torture import bucket, cluster, scenario, shared, soak, spark, store, topic

Part = Callable[[argparse.Namespace, float, "Counter[str]"], Awaitable[None]]


async def _topic(given: argparse.Namespace, seconds: float, tally: Counter[str]) -> None:
    between = spark.spark_writes() if given.spark else None
    await topic.run_topics(
        given.seed,
        seconds,
        tally,
        given.runs,
        given.fault,
        between,
        given.kind,
        given.retention,
    )


async def _bucket(given: argparse.Namespace, seconds: float, tally: Counter[str]) -> None:
    await bucket.run_buckets(given.seed, seconds, tally, given.runs)


async def _cluster(given: argparse.Namespace, seconds: float, tally: Counter[str]) -> None:
    await cluster.torture(given.seed, seconds, tally)


async def _shared(given: argparse.Namespace, seconds: float, tally: Counter[str]) -> None:
    await shared.torture(given.seed, seconds, tally)


async def _spark(given: argparse.Namespace, seconds: float, tally: Counter[str]) -> None:
    await asyncio.to_thread(spark.torture, given.seed, seconds, tally)


async def _store(given: argparse.Namespace, seconds: float, tally: Counter[str]) -> None:
    await store.torture(given.seed, seconds, tally, given.runs)


async def _soak(given: argparse.Namespace, seconds: float, tally: Counter[str]) -> None:
    await soak.soak(given.seed, seconds, tally, given.report)


PARTS: dict[str, Part] = {
    "bucket": _bucket,
    "topic": _topic,
    "cluster": _cluster,
    "shared": _shared,
    "soak": _soak,
    "store": _store,
    "spark": _spark,
}
DEFAULT_PARTS = ("bucket", "topic", "cluster", "shared", "store", "soak")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="duration of all parts together (default: 120)"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the work and the faults (default: random)"
    )
    parser.add_argument("--only", choices=PARTS, help="run one part (default: all parts but spark)")
    parser.add_argument("--runs", "--lives", type=int, default=None, help="maximum number of seeds")
    parser.add_argument("--fault", choices=scenario.FAULTS, help="the only fault of topics")
    parser.add_argument("--kind", choices=scenario.KINDS, help="the kind of all topics")
    parser.add_argument(
        "--retention",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="all topics have automatic retention, or none has",
    )
    parser.add_argument("--spark", action="store_true", help="Spark writes to the topics too")
    parser.add_argument("--report", default=None, help="file for the HTML page of the soak")
    given = parser.parse_args()
    if given.seed is None:
        given.seed = random.SystemRandom().randrange(1_000_000)
    return given


async def torture(given: argparse.Namespace) -> bool:
    """Run every chosen part for its share of the time; return whether all passed."""
    chosen = [given.only] if given.only else DEFAULT_PARTS
    passed = True
    for name in chosen:
        tally: Counter[str] = Counter()
        started = time.monotonic()
        try:
            await PARTS[name](given, given.seconds / len(chosen), tally)
        except PromiseBroken as exc:
            passed = False
            print(f"BROKEN in {name}: {exc}", file=sys.stderr, flush=True)
        counts = ", ".join(f"{count} {what}" for what, count in sorted(tally.items()))
        elapsed = time.monotonic() - started
        print(f"{name}: {counts or 'nothing'} in {elapsed:.0f} s", flush=True)
    return passed


def main() -> None:
    given = arguments()
    logging.getLogger("persisting").setLevel(logging.CRITICAL)
    print(f"seed {given.seed}", flush=True)
    sys.exit(not asyncio.run(torture(given)))


if __name__ == "__main__":
    main()
