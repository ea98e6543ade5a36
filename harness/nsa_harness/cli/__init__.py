"""The command line of nsa-harness: each command parses its arguments, calls a function, and prints the result."""
