"""What `doctor` measures on this machine."""
