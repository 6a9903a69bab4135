"""The programs in examples/ that read topics for training run as a user would run them."""

from __future__ import annotations

from support.example_runner import run_example


def test_killed_ranks_resume_with_another_world_size(tmp_path):
    output = run_example("train_and_resume.py", str(tmp_path))
    assert "2 ranks ended: [-9]" in output
    assert "every row was used once: True" in output


def test_replay_training_uses_no_rollout_twice(tmp_path):
    output = run_example("replay_training.py", str(tmp_path))
    assert "no rollout was used twice: True" in output
    assert "used: 60 of 60" in output
