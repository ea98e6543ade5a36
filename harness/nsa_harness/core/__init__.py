"""Pure functions and immutable values. Nothing here reads files, processes, clocks or the environment."""
