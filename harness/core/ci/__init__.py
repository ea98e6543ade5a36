"""The nightly: its matrix, and the summary of its runs."""
