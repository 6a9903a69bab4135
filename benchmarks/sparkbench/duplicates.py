"""Near duplicates of short texts, compared with a join by prefixes in plain Python, one thread."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
from collections import Counter, defaultdict

import pyarrow as pa
from corebench.report import Target, stopwatch

from sparkbench.rows import Bench

THRESHOLD, SHINGLE = 0.8, 5
COMPARED = 20_000
JOIN = "a prefix join in Python"


def duplicates(bench: Bench) -> None:
    """Pair 20,000 texts, and as many as the machine has package descriptions."""
    from persisting.spark import jobs

    texts = _texts()
    for count in sorted({min(COMPARED, len(texts)), len(texts)}):
        some = texts[:count]
        frame = bench.spark.createDataFrame(pa.table({"n": range(count), "text": some}))
        ours = []
        for _ in range(bench.run.repeat):
            with stopwatch() as mine:
                jobs.near_duplicates(frame, "text", THRESHOLD, order_by="n").count()
            ours.append(mine())
        with stopwatch() as theirs:
            _prefix_join(some)
        name = f"near duplicates of {count:,} texts"
        target = Target("ratio", at_most=1.0) if count == COMPARED else None
        bench.run.add("duplicates", name, min(ours), "s", JOIN, theirs(), target)


def _texts() -> list[str]:
    """Return the one-line descriptions of Debian's packages, else combinations of words."""
    if shutil.which("apt-cache"):
        dump = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True)
        lines = [line for line in dump.stdout.splitlines() if line.startswith("Description")]
        found = [
            line.partition(": ")[2] for line in lines if not line.startswith("Description-md5")
        ]
        if len(found) >= COMPARED:
            random.Random(1).shuffle(found)
            return found
    chance = random.Random(1)
    words = [f"{chance.randrange(36**5):x}" for _ in range(20_000)]
    return [" ".join(chance.choices(words, k=7)) for _ in range(COMPARED)]


def _prefix_join(texts: list[str]) -> int:
    """Count similar pairs: two sets that are similar share one of their rarest shingles."""
    sets = []
    for text in texts:
        plain = " ".join(text.casefold().split())
        places = range(max(1, len(plain) - SHINGLE + 1))
        sets.append({plain[start : start + SHINGLE] for start in places})
    frequency = Counter(shingle for own in sets for shingle in own)
    with_shingle: dict[str, list[int]] = defaultdict(list)
    pairs = 0
    for number in sorted(range(len(sets)), key=lambda number: len(sets[number])):
        own = sets[number]
        rarest = sorted(own, key=lambda shingle: (frequency[shingle], shingle))
        candidates = set()
        for shingle in rarest[: len(own) - math.ceil(THRESHOLD * len(own)) + 1]:
            candidates.update(
                other for other in with_shingle[shingle] if len(sets[other]) >= THRESHOLD * len(own)
            )
            with_shingle[shingle].append(number)
        for other in candidates:
            common = len(own & sets[other])
            pairs += common >= THRESHOLD * (len(own) + len(sets[other]) - common)
    return pairs
