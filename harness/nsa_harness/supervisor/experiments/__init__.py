"""The parts of the commands bisect, claim and ready that launch programs and store results."""
