"""The output of nsa-harness on a terminal."""
