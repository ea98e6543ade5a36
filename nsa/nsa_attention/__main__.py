"""Entry point of `python /path/to/nsa_attention`, which runs the training program."""

import importlib
import os
import sys
from pathlib import Path

# The package's import name: the name of its directory, preceded by those of the packages that contain it.
place = Path(__file__).resolve().parent
name = place.name
while (place.parent / "__init__.py").is_file():
    place = place.parent
    name = f"{place.name}.{name}"

# Python puts the script's own directory first on sys.path. Its modules would then be importable without their package,
# and a package of the same name in the working directory would take precedence.
sys.path[0] = str(place.parent)

# PyTorch's OpenMP library reads this when it is loaded. Threads that spin while waiting make a step tens of times
# slower if another process uses the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

sys.exit(importlib.import_module(f"{name}.train").main())
