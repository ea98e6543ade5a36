"""Bisection: from "it fails" to the smallest difference that matters, by asking as little as possible."""
