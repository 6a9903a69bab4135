"""tests/nightly.py runs every part and reports the failed ones."""

from __future__ import annotations

import nightly
from nightly import Part, Result
from torture.run import PARTS


def test_nightly_runs_the_parts_after_a_failed_one() -> None:
    ran: list[str] = []

    def run(part: Part) -> int:
        ran.append(part.name)
        return 1 if part.name == "first" else 0

    results = nightly.run_all([Part("first", ["-"]), Part("second", ["-"])], run)
    assert ran == ["first", "second"]
    assert [result.status for result in results] == [1, 0]


def test_nightly_summary_names_durations_and_failed_parts() -> None:
    lines = nightly.summary([Result("tests", 0, 3661.0), Result("soak", 1, 59.0)]).splitlines()
    assert lines[0].split() == ["tests", "1:01:01", "passed"]
    assert lines[1].split() == ["soak", "0:00:59", "FAILED", "(exit", "status", "1)"]
    assert lines[2].split() == ["all", "1:02:00", "FAILED:", "soak"]


def test_nightly_runs_the_marked_tests_torch_and_all_parts_of_torture() -> None:
    commands = {part.name: part.command for part in nightly.parts("2", 60, 7)}
    assert commands["nightly tests"][-2:] == ["-m", "nightly"]
    assert commands["torch tests"][:2] == ["make", "test-torch"]
    torture = [command[-1] for name, command in commands.items() if name.startswith("torture ")]
    assert sorted(torture) == sorted(PARTS)
    assert len(commands) == 2 + len(torture)
