"""The actions that planted faults perform, such as blocking, raising an exception, or exiting.

For every action, `heals_s` is None for the real fault. Otherwise it is the number of seconds after which the healthy
twin of the fault continues. Each line that blocks, loops, raises or exits is in a function of its own, so that stacks
show it clearly.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

SLOW_STEP_S = 40.0
LEAK_FLOATS = 2 << 20  # 8 MiB per step
FEED_AFTER = "import os, sys, time; time.sleep(float(sys.argv[2])); os.write(int(sys.argv[1]), b'x')"
NEVER_S = 1e9
CONTINUE_AFTER = "import os, sys, time; time.sleep(float(sys.argv[2])); os.kill(int(sys.argv[1]), 18)"


def take_a_held_lock(heals_s: float | None) -> None:
    """Deadlock on a lock that this thread already holds, permanently or for `heals_s` seconds."""
    lock = threading.Lock()
    lock.acquire()
    if heals_s is not None:
        timer = threading.Timer(heals_s, lock.release)
        timer.daemon = True
        timer.start()
    _wait_for_the_lock(lock)


def _wait_for_the_lock(lock: threading.Lock) -> None:
    lock.acquire()


def spin_in_python(heals_s: float | None) -> None:
    """Run a busy loop, indefinitely or for `heals_s` seconds."""
    _spin_until(float("inf") if heals_s is None else time.monotonic() + heals_s)


def _spin_until(end_s: float) -> None:
    turns = 0
    while time.monotonic() < end_s:
        turns += 1


def crawl_token_by_token(torch: Any, hidden: Any, heals_s: float | None) -> None:
    """Slow training down with a Python loop over the tokens of `hidden`.

    The loop ends after `heals_s` seconds, by default SLOW_STEP_S, and its result is not used. Its saved tensors are
    hidden from an enclosing checkpoint, which would otherwise count them.
    """
    end_s = time.monotonic() + (SLOW_STEP_S if heals_s is None else heals_s)
    tokens = hidden.detach().float().reshape(-1, hidden.shape[-1])[:512].clone().requires_grad_()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        while time.monotonic() < end_s:
            _select_token_by_token(torch, tokens, end_s)


def _select_token_by_token(torch: Any, tokens: Any, end_s: float) -> Any:
    outputs = []
    for token in range(len(tokens)):
        scores = torch.mv(tokens, tokens[token])
        best = torch.topk(scores, min(4, len(tokens))).indices
        weights = torch.softmax(scores[best], dim=0)
        outputs.append(weights @ tokens[best])
        if time.monotonic() >= end_s:
            break
    return torch.stack(outputs)


def _as_it_is(tensor: Any) -> Any:
    return tensor


def raise_an_error(where: str, heals_s: float | None) -> None:
    """Raise a RuntimeError that mentions `where`. If `heals_s` is given, catch it again and return."""
    if heals_s is None:
        _raise(where)
    try:
        _raise(where)
    except RuntimeError:
        return


def _raise(where: str) -> None:
    raise RuntimeError(f"planted: {where}")


def send_itself_sigkill(heals_s: float | None) -> None:
    """Kill this process with SIGKILL. If `heals_s` is given, send the harmless SIGCONT instead."""
    os.kill(os.getpid(), signal.SIGKILL if heals_s is None else signal.SIGCONT)


def send_itself_sigstop(heals_s: float | None) -> None:
    """Stop this process with SIGSTOP, permanently or for `heals_s` seconds."""
    helper = None
    if heals_s is not None:
        command = [sys.executable, "-I", "-S", "-c", CONTINUE_AFTER, str(os.getpid()), str(heals_s)]
        helper = subprocess.Popen(command)
    os.kill(os.getpid(), signal.SIGSTOP)
    if helper is not None:
        helper.wait()


def leave_with_status_0(heals_s: float | None) -> None:
    """Exit with status 0 in the middle of training. If `heals_s` is given, only a forked child exits."""
    child = 0 if heals_s is None else os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def come_late(heals_s: float | None) -> None:
    """Sleep for `heals_s` or SLOW_STEP_S seconds, in front of a collective or in a recomputed layer."""
    time.sleep(SLOW_STEP_S if heals_s is None else heals_s)


def a_copy_to_keep(torch: Any, hidden: Any) -> Any:
    """Return a float copy of a layer's output with at least LEAK_FLOATS elements, which the caller keeps as a leak."""
    times = -(-LEAK_FLOATS // hidden.numel())
    with torch.no_grad():
        return hidden.detach().float().flatten().repeat(times)


def wait_for_a_feeder(heals_s: float | None) -> None:
    """Wait for data from a helper process, as a starved loader would, for `heals_s` seconds or practically forever."""
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", "-c", FEED_AFTER, str(writing), str(NEVER_S if heals_s is None else heals_s)]
    feeder = subprocess.Popen(command, pass_fds=(writing,))
    os.close(writing)
    _read_the_next_batch(reading)
    os.close(reading)
    feeder.wait()


def _read_the_next_batch(reading: int) -> None:
    os.read(reading, 1)
