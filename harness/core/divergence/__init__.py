"""Where the ranks part."""
