"""Spark's Python workers end quietly when Java closes their socket, and report all other errors."""

from __future__ import annotations

import importlib.util
import traceback
from pathlib import Path

import pytest

from persisting.spark import settings, worker_exit
from persisting.spark.worker_exit import QuietTraceback

DAEMON = "spark.python.daemon.module"
SOCKETS = "spark.python.unix.domain.socket.enabled"


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "broken"), ConnectionResetError(104, "gone")]
)
def test_traceback_of_a_closed_socket_is_not_printed(
    error: OSError, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise error
    except OSError:
        QuietTraceback().print_exc()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error", [ValueError("no luck"), OSError(28, "no luck"), ConnectionRefusedError("no luck")]
)
def test_traceback_of_another_error_is_printed(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise error
    except Exception:
        QuietTraceback().print_exc()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Traceback (most recent call last):")
    assert err.rstrip().endswith("no luck")


def test_quiet_traceback_has_everything_else_of_the_module() -> None:
    assert QuietTraceback().format_exc is traceback.format_exc


def test_local_sessions_have_our_daemon_and_unix_sockets_by_default(tmp_path: Path) -> None:
    for master in ("local[2]", "local-cluster[2,1,1024]"):
        chosen = settings.defaults(master, tmp_path, {})
        assert chosen[DAEMON] in worker_exit.DAEMONS
        assert importlib.util.find_spec(chosen[DAEMON]) is not None
        assert chosen[SOCKETS] == "true"


def test_sessions_with_another_python_or_elsewhere_keep_the_daemon_of_spark(tmp_path: Path) -> None:
    other = {"spark.pyspark.python": "/usr/bin/python3"}
    for chosen in (
        settings.defaults("local[2]", tmp_path, other),
        settings.defaults("spark://elsewhere:7077", tmp_path, {}),
    ):
        assert not {DAEMON, SOCKETS} & set(chosen)
