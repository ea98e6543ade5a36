"""The search from "it fails" to the smallest difference that matters."""
