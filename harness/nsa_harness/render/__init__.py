"""Terminal output and output files: each module turns a report, or the events of a run, into text."""
