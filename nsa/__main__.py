"""`python /path/to/nsa`: the training program from its directory, whatever the working directory holds."""

import sys
from pathlib import Path

# Python puts the script's own directory first: its modules would be importable without their package, and an nsa/ of
# the user's would win over this one.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from nsa.train import main  # noqa: E402

sys.exit(main())
