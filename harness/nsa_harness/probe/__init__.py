"""What rides in the training process: it writes marks to the board, and touches nothing else of the program.

Loaded by file path as `_nsa_harness.probe`, never as `nsa_harness.probe`: a user's own `harness.py` must not matter.
Standard library only, Python >= 3.9; torch is used when the program has imported it, never imported.
"""
