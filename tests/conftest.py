"""What all tests share: the programs they start find the harness compiled."""

from __future__ import annotations

import os
import sys

# Whoever forbids bytecode pays for it in each of some hundred interpreters started here: 2 s to compile the harness.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
