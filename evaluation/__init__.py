"""Measures the product: programs of known truth, what was said of them, and one scorer. It ships in no wheel."""
