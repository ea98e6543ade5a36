"""Pure functions and immutable values, which read no file, process, clock or environment."""
