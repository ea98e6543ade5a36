"""Rank 0 cannot read its options: argparse leaves with code 2 before the group exists."""

import argparse
import os

from _job import FAULT, begin, end

LABEL = {"verdict": "FAIL", "cause": "bad_exit", "culprit": [0]}

rank = int(os.environ["RANK"])
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
options = parser.parse_args(["--width", "wide" if FAULT and rank == 0 else "16"])  # to blame
begin()
end()
