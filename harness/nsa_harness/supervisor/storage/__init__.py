"""The files of a run: writing, reading and redacting them."""
