"""What a forked rank must do as a started one does: forked.py WAY. Each rank prints what the test compares."""

import hashlib
import importlib
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import warnings

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ.get("RANK", "0"))


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([float(index * index), float(torch.initial_seed() % 1000)])


def facts():
    """Everything a program can see of how it was started. Names of `drawn` must differ between ranks."""
    with open("/proc/self/environ", "rb") as kernel, open("/proc/self/cmdline", "rb") as words:
        block = [entry for entry in kernel.read().split(b"\0") if entry]
        shown = {entry.partition(b"=")[0]: entry for entry in block}
        command = words.read().rstrip(b"\0").split(b"\0")
    known = {"_NSA_HARNESS_RANK_PID"}  # the probe's, set by the rank itself
    unlike = [n for n, v in os.environ.items() if n not in known and shown.get(n.encode()) != f"{n}={v}".encode()]
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": repr(sys.flags),
        "main": sorted(name for name in vars(main) if name.startswith("__")),
        "main_is": [main.__name__, main.__file__, repr(main.__spec__), type(main.__loader__).__name__],
        "filters": [repr(one) for one in warnings.filters],
        "signals": {n.name: str(signal.getsignal(n)) for n in signal.valid_signals() if isinstance(n, signal.Signals)},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "wakeup": signal.set_wakeup_fd(-1),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "command": [word.decode() for word in command],
        "shown_beyond": sorted(set(shown) - {name.encode() for name in os.environ}) == [],
        "shown_twice": len(block) - len(shown),
        "unlike": unlike,
        "names": sorted(os.environ),
        "threads": [threading.current_thread() is threading.main_thread(), torch.get_num_threads()],
        "native": threading.main_thread().native_id == os.getpid(),
        "streams": [[one.encoding, one.write_through, one.line_buffering] for one in (sys.stdin, sys.stdout)],
        "stdin": os.readlink("/proc/self/fd/0"),
        "opened": sorted(os.path.basename(os.readlink(f"/proc/self/fd/{n}")) for n in (1, 2)),
        "limits": [resource.getrlimit(resource.RLIMIT_NOFILE), os.nice(0), os.umask(0o22)],
        "seed": [torch.initial_seed(), hashlib.md5(torch.get_rng_state().numpy().tobytes()).hexdigest()],
        "covered": covered(),
        "start": multiprocessing.get_start_method(),
        "cwd": os.getcwd(),
        "hook": sys.excepthook.__name__,
        "drawn": [random.random(), numpy.random.random(), os.urandom(4).hex()],
    }


def covered():
    """Functions of torch.distributed that another module has as they were before the probe covered them."""
    importlib.import_module("torch._dynamo")
    now = vars(dist.distributed_c10d)
    before = [one.__wrapped__ for one in now.values() if hasattr(one, "__wrapped__")]
    spaces = [(name, vars(module)) for name, module in sys.modules.items() if name.startswith("torch.")]
    tables = [(f"{name}.{key}", one) for name, space in spaces for key, one in space.items() if type(one) is dict]
    held = [
        f"{name}.{key}" for name, space in spaces for key, one in space.items() if any(one is old for old in before)
    ]
    return sorted(held + [name for name, one in tables if any(old in one for old in before)])


def load(start):
    loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context=start)
    return [batch[:, 0].tolist() for batch in loader]


def close_what_it_opened():
    pipes = [end for _ in range(20) for end in os.pipe()]
    os.closerange(min(pipes), max(pipes) + 1)
    os.close(0)
    return min(pipes) > 2


def take_signals():
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGUSR1)}
    os.kill(os.getpid(), signal.SIGUSR1)
    return sorted(str(one) for one in previous.values())


def fork_itself():
    child = os.fork()
    if child == 0:
        os._exit(4)
    started = subprocess.run([sys.executable, "-c", "import os; print(os.environ['RANK'])"], capture_output=True)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), started.stdout.decode()


def raise_in_the_middle():
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError(f"rank {RANK} cannot go on") from error


def main():
    way = sys.argv[1]
    if way == "ways":
        print("DID", close_what_it_opened(), take_signals(), fork_itself())
    dist.init_process_group("gloo")
    if way == "facts":
        print("FACTS", json.dumps(facts()))
    elif way in ("fork", "spawn"):
        print("LOADED", load(way))
    elif RANK == 1 and way != "ways":
        {
            "exit3": lambda: sys.exit(3),
            "os_exit": lambda: os._exit(5),
            "words": lambda: sys.exit("it leaves with words"),
            "raises": raise_in_the_middle,
            "abort": os.abort,
        }[way]()
    value = torch.ones(2)
    dist.all_reduce(value)
    print("REDUCED", value.tolist())


if __name__ == "__main__":
    main()
