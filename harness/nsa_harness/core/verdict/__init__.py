"""The verdict of a run, with the wait-for graph and the proof of a hang that it is based on."""
