"""Everything in the harness that is specific to nsa.train, such as its options and files."""
