"""Planted faults and what is said of them."""
