"""The records that the benchmarks store, generated from a fixed seed."""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

FIELDS = ("id", "value", "text", "score")

_SOUNDS = [c + v + e for c in "bcdfghklmnprstvw" for v in "aeiou" for e in ("", "n", "r", "s", "t")]


def _vocabulary(size: int) -> tuple[list[str], list[float]]:
    """Return words with weights as in real text, so that compression is realistic."""
    rng = random.Random(3)
    words = ["".join(rng.choices(_SOUNDS, k=rng.choice((1, 2, 2, 3, 3, 4)))) for _ in range(size)]
    return words, list(accumulate(1 / (rank + 3) for rank in range(size)))


_WORDS, _WEIGHTS = _vocabulary(8000)


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, cum_weights=_WEIGHTS, k=words))


def stream(count: int, *, seed: int = 7) -> Iterator[dict[str, Any]]:
    """Yield ``count`` records of four small fields; ``text`` has about 50 characters."""
    rng = random.Random(seed)
    for number in range(count):
        yield {
            "id": f"r{number:09d}",
            "value": rng.randrange(1_000_000),
            "text": _text(rng, 7),
            "score": rng.random(),
        }


def batches(count: int, size: int) -> list[list[dict[str, Any]]]:
    """Return the same records in lists of ``size``."""
    made = list(stream(count))
    return [made[start : start + size] for start in range(0, count, size)]


def docstrings() -> Iterator[dict[str, Any]]:
    """Yield real text: docstrings of Python's standard library, about 200 characters each."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                yield {"id": f"{path.stem}:{node.body[0].lineno}", "text": text}


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _parsed(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return ast.Module([], [])


def events(count: int) -> Iterator[dict[str, Any]]:
    """Yield JSON text as a web server logs it: few keys, varied values."""
    rng = random.Random(13)
    for number in range(count):
        body = {
            "user_id": rng.randrange(1_000_000),
            "event": rng.choice(("click", "view", "buy")),
            "url": f"https://example.com/products/{rng.randrange(5000)}",
            "user_agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36",
            "session": f"{rng.getrandbits(64):x}",
            "duration_ms": rng.random() * 1000,
            "items": [rng.randrange(100) for _ in range(3)],
        }
        yield {"id": f"e{number:09d}", "body": json.dumps(body)}
