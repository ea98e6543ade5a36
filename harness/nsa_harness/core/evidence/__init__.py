"""Data classes for observations made during a run, and parsers for logs and dumps."""
