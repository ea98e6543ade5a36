"""The recordings of a run: which statements each rank executed, and why the ranks took different ways."""
