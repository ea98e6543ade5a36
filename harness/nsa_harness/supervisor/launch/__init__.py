"""From words to running ranks under a guardian."""
