"""What a trial kills in: `healthy` works for some seconds, `hangs` never ends, a number above 2 fails at once."""

import sys
import time

mode = sys.argv[1]
if mode.isdigit():
    sys.exit(int(mode) > 2)
for _ in range(30 if mode == "healthy" else 100_000):
    time.sleep(0.1)
