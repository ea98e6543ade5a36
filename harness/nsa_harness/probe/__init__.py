"""Code that runs inside each rank and records the rank's progress in a status file.

The probe changes no result of the program. The package is loaded by file path as `_nsa_harness.probe`, never as
`nsa_harness.probe`, so a user's module cannot shadow it. It needs only the standard library and Python 3.9. It uses
torch after the program has imported torch, and never imports torch itself. `patches.patch` wraps every function whose
calls the probe observes.
"""
