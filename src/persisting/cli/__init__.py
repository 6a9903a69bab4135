"""The command ``persisting``: parse, call the library, print.

It can do nothing that the library cannot. Results are small typed objects: ``--json`` prints them
as they are, people get a table.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process."""
    try:
        from persisting.cli.app import run

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # while the modules load
        sys.exit(130)
