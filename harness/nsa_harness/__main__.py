"""`python -m nsa_harness`: the command line without its console script."""

from nsa_harness.cli.main import main

main()
