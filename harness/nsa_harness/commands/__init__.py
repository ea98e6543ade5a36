"""The functions behind the commands.

Only these modules connect planning, launching, judging and rendering.
"""
