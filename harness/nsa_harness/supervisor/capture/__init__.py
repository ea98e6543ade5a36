"""Collects evidence about a running job from the kernel, debuggers and the ranks."""
