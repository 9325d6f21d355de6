"""``python -m tokenv``, the same as ``tokenv``."""

from tokenv.cli.main import main

if __name__ == "__main__":
    main()
