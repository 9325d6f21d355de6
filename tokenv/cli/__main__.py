"""``python -m tokenv.cli``."""

from tokenv.cli.main import main

main()
