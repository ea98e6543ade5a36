"""Effects on one node: files, processes, clocks. Never imports torch."""
