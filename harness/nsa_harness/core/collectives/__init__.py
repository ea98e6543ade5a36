"""The ranks' collective calls compared: aligned timelines, and the first call where the ranks diverge."""
