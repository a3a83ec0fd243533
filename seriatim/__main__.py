"""`python -m seriatim` is `seriatim`."""

from seriatim.cli import main

main()
