"""Where evidence comes from: the kernel, the debuggers, the ranks themselves."""
