"""The command line: parse the arguments, call a function of `commands`, print its result, set the exit code."""
