"""Comparison of the collective calls of all ranks, to find the first call at which they diverge."""
