"""What a trial kills in: `healthy` works for some seconds, `hangs` never ends; with `:3` behind it only that from 3 on.

`fails:3` ends with 1.
"""

import sys
import time

mode, _, value = sys.argv[1].partition(":")
if value and (int(value) < 3 or mode == "fails"):
    sys.exit(int(value) > 2)
for _ in range(30 if mode == "healthy" else 100_000):
    time.sleep(0.1)
