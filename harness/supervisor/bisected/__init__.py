"""What a bisection needs of this machine: its subject, its launches, its worktrees, what it has kept on disk."""
