"""Low-communication training over loosely connected islands."""
