"""The machine and the harness itself: doctor, selftest, overhead."""
