"""Plans launches from command-line arguments, and starts them under a reaper process."""
