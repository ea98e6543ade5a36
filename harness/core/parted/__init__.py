"""Where the ranks part: what their collectives, steps and gradients show side by side."""
