"""A program with handlers of its own everywhere, which say what they saw: signals, hooks, exits, faulthandler."""

import atexit
import faulthandler
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

heard: list[int] = []


def say(*words: object) -> None:
    print(*words, flush=True)


def on_signal(number: int, _frame: object) -> None:
    heard.append(number)
    say("signal", signal.Signals(number).name, threading.current_thread() is threading.main_thread())


def fail_in_a_thread() -> None:
    raise KeyError("in a thread")


def receive_signals() -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, on_signal)
        signal.raise_signal(number)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    wait_for_signals(5)
    say("ready")
    wait_for_signals(6)


def wait_for_signals(count: int) -> None:
    """Not by signal.pause(), which misses one that comes just before it."""
    while len(heard) < count:
        time.sleep(0.01)


def main() -> None:
    atexit.register(say, "first registered")
    sys.excepthook = lambda kind, error, _traceback: say("excepthook", kind.__name__, error)
    threading.excepthook = lambda said: say("threading.excepthook", said.exc_type.__name__)
    faulthandler.enable(file=sys.stderr, all_threads=False)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2))
    thread = threading.Thread(target=fail_in_a_thread)
    thread.start()
    thread.join()
    atexit.register(say, "last registered")
    receive_signals()
    say("faulthandler", faulthandler.is_enabled())
    raise ValueError("the end")


if __name__ == "__main__":
    main()
