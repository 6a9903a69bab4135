"""The command that reproduces a failure."""

from __future__ import annotations


def rerun_command(part: str, seed: int, *more: str) -> str:
    words = " ".join((f"--only {part} --seed {seed}", *more))
    return f'reproduce with: make torture TORTURE_ARGS="{words}"'
