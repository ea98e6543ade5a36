"""Scenarios: from YAML to the specification of a launch."""
