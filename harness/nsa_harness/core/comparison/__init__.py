"""Conclusions from several runs: contrasts, hypotheses, decisions, sweeps."""
