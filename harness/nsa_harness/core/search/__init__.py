"""The search of `bisect`: from "it fails" to the smallest difference that makes it fail."""
