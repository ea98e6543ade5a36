"""Who waits for whom, and what that makes of a run."""
