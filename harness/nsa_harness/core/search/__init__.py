"""From "it fails" to the smallest difference that matters."""
