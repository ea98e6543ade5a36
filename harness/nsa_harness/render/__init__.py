"""Terminal output and output files.

Each module turns a report, or the events of a run, into text.
"""
