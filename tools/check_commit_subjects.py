"""Check the form of commit subjects.

    python tools/check_commit_subjects.py                  commits after BASE (make lint)
    python tools/check_commit_subjects.py --message FILE   one message (the commit-msg hook)

A subject has at most 72 characters, starts with a capital letter and does not end with a period.
It should also be an imperative, which no program can check. Without Git, outside a clone, or in a
shallow clone that lacks BASE, nothing is checked; a complete clone must have BASE.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

BASE = "039eb72f4b78d7b2e9211747b4fa4612beb9fd43"
"""Subjects up to this commit were written before the rule."""
LIMIT = 72
AUTOSQUASH = ("fixup!", "squash!", "amend!")


def problems(subject: str) -> list[str]:
    """Return what is wrong with a subject, an empty list if nothing is."""
    if not subject:
        return ["is empty"]
    found = []
    if len(subject) > LIMIT:
        found.append(f"has {len(subject)} characters; at most {LIMIT} are allowed")
    if not subject[0].isupper():
        found.append("does not start with a capital letter")
    if subject.endswith("."):
        found.append("ends with a period")
    return found


def subject_of(message: str) -> str:
    """Return the first line of a commit message that is not a comment."""
    lines = [line for line in message.splitlines() if line.strip() and not line.startswith("#")]
    return lines[0].strip() if lines else ""


def subjects_since(base: str) -> list[tuple[str, str]]:
    """Return hash and subject of each commit after ``base``, merges left out."""
    try:
        done = subprocess.run(
            ["git", "log", "--no-merges", "--format=%h\t%s", f"{base}..HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return []
    if done.returncode:
        if _is_complete_clone():
            raise SystemExit(f"cannot list the commits after {base}: {done.stderr.strip()}")
        return []
    pairs = (line.split("\t", 1) for line in done.stdout.splitlines())
    return [(commit, subject) for commit, subject in pairs]


def _is_complete_clone() -> bool:
    done = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() == "false"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the form of commit subjects.")
    parser.add_argument("--message", type=Path, help="file with one commit message")
    parser.add_argument("--base", default=BASE, help="check the commits after this one")
    given = parser.parse_args()
    if given.message is not None:
        subject = subject_of(given.message.read_text("utf-8"))
        named = [] if subject.startswith(AUTOSQUASH) else [("this commit", subject)]
    else:
        named = subjects_since(given.base)
    failed = False
    for commit, subject in named:
        for problem in problems(subject):
            failed = True
            print(f"{commit}: the subject {problem}: {subject}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
