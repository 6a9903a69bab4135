"""The sockets of this process, which a forked child closes.

A child that kept a copy of a connection would hide the death of its parent from the other side,
and a copy of a listening socket would take connections that nobody answers.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_opening = threading.RLock()
"""Held during a fork, so that no socket is open without being listed."""


def new_socket() -> socket.socket:
    """Return a Unix socket."""
    with _opening:
        created = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _sockets.add(created)
    return created


def accept(listening: socket.socket) -> socket.socket:
    """Accept a connection; raise ``BlockingIOError`` if there is none."""
    with _opening:
        connected, _ = listening.accept()
        _sockets.add(connected)
    connected.setblocking(False)
    return connected


def _close_copies() -> None:
    _opening.release()
    for copy in list(_sockets):
        # Detached first: an object of the parent that is collected here must not close a file
        # that has the same number later.
        fd = copy.detach()
        if fd >= 0:
            os.close(fd)


os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_copies
)
