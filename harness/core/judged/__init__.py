"""One run: from evidence to verdict, findings and outcome."""
