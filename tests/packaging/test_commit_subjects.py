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


def git(folder: Path, *args: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run(["git", *identity, *args], cwd=folder, capture_output=True, check=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A complete clone with two commits, the second with a bad subject."""
    git(tmp_path, "init", "-q", "clone")
    folder = tmp_path / "clone"
    git(folder, "commit", "-q", "--allow-empty", "-m", "Begin")
    git(folder, "tag", "base")
    git(folder, "commit", "-q", "--allow-empty", "-m", "ends with a period.")
    return folder


def test_subjects_of_commits_after_the_base_are_checked(clone: Path) -> None:
    done = check("--base", "base", folder=clone)
    assert done.returncode == 1
    assert "ends with a period" in done.stderr
    assert check("--base", "HEAD", folder=clone).returncode == 0


def test_complete_clone_without_the_base_is_an_error(clone: Path) -> None:
    done = check("--base", "0" * 40, folder=clone)
    assert done.returncode == 1
    assert "cannot list the commits after" in done.stderr


def test_commit_subjects_are_not_checked_outside_a_clone_or_in_a_shallow_one(
    clone: Path, tmp_path: Path
) -> None:
    assert check(folder=tmp_path).returncode == 0
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{clone}", "shallow")
    assert check(folder=tmp_path / "shallow").returncode == 0
