"""What doctor measures."""
