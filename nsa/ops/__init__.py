"""The attention operations: one module per branch, all on the same query tiles."""
