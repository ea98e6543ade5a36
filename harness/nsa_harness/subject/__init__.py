"""Everything that is specific to nsa.train: its options, environment variables, claims, gates and files."""
