"""TCP_NODELAY for Pulsing's server sockets.

Pulsing leaves Nagle's algorithm on, which delays every small reply of a stream by 40 ms.
"""

from __future__ import annotations

import os
import socket
import stat


def disable_nagle(address: str) -> None:
    """Set TCP_NODELAY on this process's socket that listens on ``address``.

    On Linux the accepted sockets inherit it; elsewhere this does nothing.
    """
    port = int(address.rsplit(":", 1)[1])
    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with duplicate:
            try:
                listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and duplicate.getsockname()[1] == port:
                    duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except (OSError, IndexError, TypeError):
                continue
