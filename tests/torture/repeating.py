"""How to see something broken again."""

from __future__ import annotations


def again(part: str, seed: int, *more: str) -> str:
    words = " ".join((f"--only {part} --seed {seed}", *more))
    return f'again: make torture TORTURE_ARGS="{words}"'
