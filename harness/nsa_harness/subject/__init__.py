"""Everything in nsa-harness that is specific to nsa.train, such as its options and files."""
