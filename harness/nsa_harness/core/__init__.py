"""Pure functions and frozen values: no file, process, clock or environment."""
