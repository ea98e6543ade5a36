"""The functions that implement the commands. Only they connect planning, launching, judging and rendering."""
