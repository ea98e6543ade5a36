"""What is known of nsa.train alone: its options, its environment, its claims and gates, its files."""
