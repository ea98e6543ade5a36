"""The rules: pure functions from a case to a finding, by family of causes."""
