"""The machine and what the harness costs on it."""
