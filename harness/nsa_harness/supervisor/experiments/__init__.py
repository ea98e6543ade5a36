"""What an experiment needs of this machine."""
