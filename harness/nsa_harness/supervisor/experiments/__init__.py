"""What a bisection needs of this machine."""
