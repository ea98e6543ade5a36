"""`python /path/to/nsa`: the training program from its directory, whatever the working directory holds."""

import importlib
import os
import sys
from pathlib import Path

# Under the name that the package has where it lies: its own folder's, behind those of the packages around it.
place = Path(__file__).resolve().parent
name = place.name
while (place.parent / "__init__.py").is_file():
    place = place.parent
    name = f"{place.name}.{name}"

# Python puts the script's own directory first: its modules would be importable without their package, and an nsa/ of
# the user's would win over this one.
sys.path[0] = str(place.parent)

# Read when torch loads its OpenMP library. Threads that spin while they wait make a step tens of times slower as soon
# as another process wants the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

sys.exit(importlib.import_module(f"{name}.train").main())
