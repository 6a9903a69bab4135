"""``python -m persisting.cli``: the command without its script."""

from persisting.cli import main

main()
