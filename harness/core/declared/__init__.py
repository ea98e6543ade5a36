"""Scenarios as declared, up to the launch that they mean."""
