"""`python /path/to/nsa`: the training program from its directory, whatever the working directory holds."""

import os
import sys
from pathlib import Path

# Python puts the script's own directory first: its modules would be importable without their package, and an nsa/ of
# the user's would win over this one.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

# Read when torch loads its OpenMP library. Threads that spin while they wait make a step tens of times slower as soon
# as another process wants the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from nsa.train import main  # noqa: E402

sys.exit(main())
