"""Pure functions and immutable values. Nothing in this package reads a file, a process, a clock or the environment."""
