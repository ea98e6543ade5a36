"""Watches a run until it ends or is proven to be stuck."""
