"""The nightly."""
