"""Terminal output and documents.

Each module turns a report, or the events of a run, into text.
"""
