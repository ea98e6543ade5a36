"""The functions that implement the commands.

Only these modules connect planning, launching, judging and rendering.
"""
