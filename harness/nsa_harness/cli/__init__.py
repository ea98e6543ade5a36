"""The command line of nsa-harness.

Each command parses its arguments, calls a function of `commands`, prints the result and sets the exit code.
"""
