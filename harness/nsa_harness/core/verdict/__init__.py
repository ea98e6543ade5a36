"""The verdict of a run (PASS, FAIL, HANG or ERROR), and the proof of a hang."""
