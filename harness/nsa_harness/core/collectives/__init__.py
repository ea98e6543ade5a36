"""Comparison of the collective calls of all ranks: their timelines, and the first call where ranks diverge."""
