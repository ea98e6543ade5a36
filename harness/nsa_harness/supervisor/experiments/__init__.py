"""The parts of bisect, claim and ready that touch this machine: subjects, launches, worktrees, stored probes."""
