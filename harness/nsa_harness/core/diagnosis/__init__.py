"""Diagnosis: finds the cause of a run's verdict."""
