"""Where evidence comes from: the kernel and the tools, each source with a limit of its own."""
