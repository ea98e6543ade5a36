"""The subject: a Native Sparse Attention language model and its training program. Knows nothing of the harness."""

import os

# Read when torch loads its OpenMP library, so it stands before any import of torch. Threads that spin while they wait
# make a step tens of times slower as soon as another process wants the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
