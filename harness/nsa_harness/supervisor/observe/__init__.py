"""Jobs that are not ours."""
