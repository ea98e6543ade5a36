"""Searches a log for regular expressions in a separate process, which can be stopped.

With some expressions Python's `re` practically never finishes. This cannot be seen in advance, and a thread cannot be
stopped inside `re`. So the search runs in a process with a CPU limit that the kernel enforces. This module, run as a
program, is that process; it imports only the standard library.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping

LIMIT_S = 2.0  # CPU time for all expressions together; it does not depend on how busy the machine is
_WAIT_S = 60.0  # limit in wall time, which may pass first on a very busy machine
_MAX_MEMORY_BYTES = 1 << 30


class EndlessExpression(Exception):
    """Raised if the search for a regular expression takes too long. The message is the name given to the expression."""


def last_matches(expressions: Mapping[str, str], text: str, limit_s: float = LIMIT_S) -> dict[str, str]:
    """Map each expression's name to group 1 of its last match, if any. Raise EndlessExpression after `limit_s`."""
    request = json.dumps([limit_s, list(expressions.values()), text])
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        output, _ = process.communicate(request.encode(), timeout=_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    matches = [json.loads(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")]
    names = list(expressions)
    if len(matches) < len(names):
        raise EndlessExpression(names[len(matches)])
    return {name: match for name, match in zip(names, matches, strict=True) if match is not None}


def _last_match(expression: str, text: str) -> str | None:
    try:
        matches = [match[1] for match in re.finditer(expression, text)]
    except (re.error, IndexError):
        return None
    return matches[-1] if matches else None


def main() -> None:
    limit_s, expressions, text = json.load(sys.stdin)
    # The default action of SIGPROF ends the process even inside `re`, where a Python signal handler could not run.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    for expression in expressions:
        print(json.dumps(_last_match(expression, text)), flush=True)


if __name__ == "__main__":
    main()
