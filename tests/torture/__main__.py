"""``python -m torture``: see run.py."""

from torture.run import main

main()
