"""`python -m strata` is the `strata` command."""

from strata.cli import main

main()
