"""Observe jobs that nsa-harness did not launch, or that it must not end."""
