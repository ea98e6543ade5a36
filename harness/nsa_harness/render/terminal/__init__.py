"""Reports on a terminal."""
