"""Run the command line with `python -m nsa_harness`."""

from nsa_harness.cli.main import main

main()
