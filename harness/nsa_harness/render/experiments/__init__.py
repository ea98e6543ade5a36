"""A bisection as text, picture and JSON."""
