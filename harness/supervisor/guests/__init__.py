"""Jobs that are not ours: watched or attached to, and left as they are."""
