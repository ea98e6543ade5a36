"""What people and other programs read: every module turns a report into text."""
