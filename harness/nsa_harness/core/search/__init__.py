"""The search behind `bisect`, which finds the smallest set of changes that makes a program fail."""
