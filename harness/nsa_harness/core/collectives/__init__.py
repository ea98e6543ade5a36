"""What the ranks did side by side, and where they part."""
