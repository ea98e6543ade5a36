"""Conclusions that are drawn by comparing several runs of a program."""
