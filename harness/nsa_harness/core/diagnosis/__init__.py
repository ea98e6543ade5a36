"""Diagnosis: finds the cause of a hang, failure or slow run."""
