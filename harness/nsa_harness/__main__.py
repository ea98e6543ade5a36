"""Runs the command line with `python -m nsa_harness`, without the console script."""

from nsa_harness.cli.main import main

main()
