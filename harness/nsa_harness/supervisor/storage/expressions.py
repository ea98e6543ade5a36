"""Regular expressions of a scenario, searched for in a log by a process of its own, which can be ended.

Python's `re` takes a time that grows without bound with some expressions, no thread of ours can be stopped in it, and
no look at an expression tells surely which ones. So each is tried where a limit of the kernel's ends it. Run as a
program (standard library only, no imports of this package) this module is that process.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping

LIMIT_S = 2.0  # of processor time, for all expressions together: a busy machine does not shorten it
_WAIT_S = 60.0  # on a machine so busy that even that takes long
_MAX_MEMORY_BYTES = 1 << 30


class EndlessExpression(Exception):
    """Names the expression that was being searched for."""


def last_matches(expressions: Mapping[str, str], text: str, limit_s: float = LIMIT_S) -> dict[str, str]:
    """Group 1 of the last match of each expression, by its name; of what does not match there is none.

    Nor of one that cannot be used. Raises EndlessExpression.
    """
    order = json.dumps([limit_s, list(expressions.values()), text])
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        answer, _ = process.communicate(order.encode(), timeout=_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        answer, _ = process.communicate()
    found = [json.loads(line) for line in answer.splitlines(keepends=True) if line.endswith(b"\n")]
    names = list(expressions)
    if len(found) < len(names):
        raise EndlessExpression(names[len(found)])
    return {name: match for name, match in zip(names, found, strict=True) if match is not None}


def _last_match(expression: str, text: str) -> str | None:
    try:
        matches = [match[1] for match in re.finditer(expression, text)]
    except (re.error, IndexError):
        return None
    return matches[-1] if matches else None


def main() -> None:
    limit_s, expressions, text = json.load(sys.stdin)
    # Its signal ends the process also within an expression, where no handler of Python's would run.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    for expression in expressions:
        print(json.dumps(_last_match(expression, text)), flush=True)


if __name__ == "__main__":
    main()
