"""The attention operations: one pattern a branch, and what computes them."""

# Of the operators that torch keeps for a process: `nsa`, or apart from those of another copy under another name.
NAMESPACE = __name__.removesuffix(".ops").replace(".", "_")
