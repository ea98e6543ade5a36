"""A launched run until it ends, or is proven to move no more."""
