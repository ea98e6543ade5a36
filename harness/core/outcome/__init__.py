"""One attempt in the words and numbers of a report."""
