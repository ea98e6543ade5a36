"""Plans the launches that a command makes, and starts them."""
