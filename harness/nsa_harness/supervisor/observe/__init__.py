"""Observes jobs that nsa-harness did not launch or must not end."""
