"""Read scenario files, which describe one run in YAML, and turn them into launches."""
