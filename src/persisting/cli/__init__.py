"""The command ``persisting``: parse, call the library, print.

It does nothing that the library cannot do. Results are small typed objects: ``--json`` prints them
unchanged, a terminal shows them as a table.
"""

from __future__ import annotations

import signal
import sys

owns_process = False
"""Whether this process runs a command and nothing else."""


def main() -> None:
    """Run the command line of this process and exit with its code."""
    global owns_process
    owns_process = True
    try:
        from persisting.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules load
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # see app.run
    sys.exit(code)
