"""`python -m strata_chaos` is the command `strata-chaos`."""

from strata_chaos.cli import main

main()
