"""tools/check_commit_subjects.py accepts good subjects and stays silent without history."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.doc_pages import ROOT

PROGRAM = ROOT / "tools" / "check_commit_subjects.py"


def check(*args: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *args],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def check_message(folder: Path, message: str) -> subprocess.CompletedProcess[str]:
    file = folder / "COMMIT_EDITMSG"
    file.write_text(message)
    return check("--message", str(file))


@pytest.mark.parametrize(
    "message",
    [
        "Trim a torn tail when the log is opened\n\nBody, which may end with a period.\n",
        "# a comment\n\nSync the folder\n",
        "X" * 72 + "\n",
        "fixup! trim a torn tail.\n",
    ],
    ids=["with body", "comment first", "72 characters", "fixup"],
)
def test_good_commit_subject_is_accepted(tmp_path: Path, message: str) -> None:
    done = check_message(tmp_path, message)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("X" * 73, "has 73 characters"),
        ("trim a torn tail", "capital letter"),
        ("Trim a torn tail.", "ends with a period"),
        ("\n# only a comment\n", "is empty"),
    ],
)
def test_bad_commit_subject_is_refused(tmp_path: Path, message: str, problem: str) -> None:
    done = check_message(tmp_path, message)
    assert done.returncode == 1
    assert problem in done.stderr


def test_nothing_is_checked_outside_a_clone_or_without_the_base_commit(tmp_path: Path) -> None:
    assert check(folder=tmp_path).returncode == 0
    assert check("--base", "0" * 40).returncode == 0
