"""From command-line arguments to running ranks under a reaper."""
