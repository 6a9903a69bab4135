"""Where an owner listens: a socket beside the topic, or a short path in a runtime folder.

The lock's note of each bucket names the socket, so nobody has to guess the path. The name is never
used twice.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from persisting.fs import PRIVATE_FILE, PRIVATE_FOLDER
from persisting.local_socket.open_sockets import new_socket

FOLDER = ".sockets"
"""The folder in a topic for the sockets of its owners."""

PATH_LIMIT = 103
"""Bytes of a path that a Unix socket takes on every system."""

_BACKLOG = 128
_SUFFIX, _DRAFT = ".sock", ".new"
_DRAFT_SECONDS = 60.0


def listen(topic: Path | None) -> tuple[socket.socket, Path]:
    """Listen on a new socket for a topic; return it with its path. Raises ``OSError``.

    ``topic`` is the topic's folder, None if it is in an object store.
    """
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    beside = [] if topic is None else [topic / FOLDER]
    *folders, last = [*beside, *runtime_folders()]
    for folder in folders:
        with suppress(OSError):  # the path is too long, or the file system has no sockets
            return _listen_in(folder, name)
    return _listen_in(last, name)


def runtime_folders() -> list[Path]:
    """Return this user's folders for sockets that cannot be in the folder of their topic."""
    folders = [Path(tempfile.gettempdir()) / f"persisting-{os.geteuid()}"]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        folders.insert(0, Path(runtime) / "persisting")
    return folders


def _listen_in(folder: Path, name: str) -> tuple[socket.socket, Path]:
    path = folder / f"{name}{_SUFFIX}"
    if len(os.fsencode(path)) > PATH_LIMIT:
        raise OSError(f"{path} is too long for a socket")
    _make_private(folder)
    _remove_stale(folder)
    draft = folder / f"{name}{_DRAFT}"
    listening = new_socket()
    try:
        listening.bind(os.fspath(draft))
        draft.chmod(PRIVATE_FILE)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        # In place only now: others remove a socket on which nobody listens.
        draft.rename(path)
    except BaseException:
        listening.close()
        with suppress(OSError):
            draft.unlink()
        raise
    return listening, path


def _make_private(folder: Path) -> None:
    """Create a folder for this user only; refuse one that others could have prepared."""
    with suppress(FileExistsError):
        folder.mkdir(mode=PRIVATE_FOLDER)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(f"{folder} is not a folder of this user")
    if stat.S_IMODE(status.st_mode) != PRIVATE_FOLDER:
        folder.chmod(PRIVATE_FOLDER)


def _remove_stale(folder: Path) -> None:
    """Remove the sockets of processes that died."""
    for entry in list(os.scandir(folder)):
        with suppress(OSError):
            if entry.name.endswith(_SUFFIX):
                if not _is_listened_to(entry.path):
                    os.unlink(entry.path)
            elif entry.name.endswith(_DRAFT):
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if age > _DRAFT_SECONDS:
                    os.unlink(entry.path)


def _is_listened_to(path: str) -> bool:
    probe = new_socket()
    try:
        probe.setblocking(False)
        probe.connect(path)
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    finally:
        probe.close()
    return True
