"""Sources of evidence: the kernel, debuggers and the ranks themselves."""
