"""`python -m aiayn` is the console script."""

from aiayn.cli import main

main()
