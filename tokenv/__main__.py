"""``python -m tokenv``, the same as ``tokenv``."""

from tokenv.cli.main import main

main()
