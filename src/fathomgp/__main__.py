"""``python -m fathomgp`` is the command line."""

from fathomgp.cli import main

main()
