"""``python -m persisting.cli``: run the command without its script."""

from persisting.cli import main

main()
