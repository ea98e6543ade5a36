"""Screens and documents: each module turns a report, or the events of a run, into text."""
