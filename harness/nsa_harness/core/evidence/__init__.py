"""Data classes for what was observed during a run, and parsers for logs and dumps."""
