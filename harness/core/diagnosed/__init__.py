"""From a verdict to its cause: the case, the rules, and what they name."""
