"""Conclusions drawn from comparisons of several runs of a program."""
