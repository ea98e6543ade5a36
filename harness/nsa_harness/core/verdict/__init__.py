"""The wait-for graph of a run, the proof of a hang, and the verdict."""
