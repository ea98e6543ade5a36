"""What lies on disk: run directories, journals, specs, and evidence read back from them."""
