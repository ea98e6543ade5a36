"""The instrumentation inside a rank: it writes progress events to a status file, and changes nothing of the program.

Loaded by file path as `_nsa_harness.probe`, never as `nsa_harness.probe`, so that no module of the user's shadows it.
Standard library only, Python >= 3.9. torch is used once the program has imported it, and is never imported. Every
function of the program's that the probe watches is covered by `patches.patch`.
"""
