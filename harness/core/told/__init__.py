"""One attempt in the words and numbers that every report shows."""
