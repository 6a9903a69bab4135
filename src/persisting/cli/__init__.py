"""The command ``persisting``: parse, call the library, print.

It does nothing that the library cannot do. Results are small typed objects: ``--json`` prints them
unchanged, a terminal shows them as a table.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line of this process and exit with its code."""
    try:
        from persisting.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while modules load, or a second Ctrl-C while a command stops
        code = 130
    # The exit of the interpreter flushes backends that are still open. Another Ctrl-C must neither
    # cut that short nor replace the exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
