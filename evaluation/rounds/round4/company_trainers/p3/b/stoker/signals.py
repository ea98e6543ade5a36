"""Everything this trainer does with signals, in one place."""
import signal

import torch
import torch.distributed as dist


class ProcessSignals:
    """SIGUSR1 from the scheduler means: wrap up, the node goes away in 90 s."""

    def __init__(self):
        self._asked = False

    def install(self):
        signal.signal(signal.SIGUSR1, self._on_usr1)
        # plain Ctrl-C in a pane should stop the launcher, not every rank on its own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # the batch system starts us with whatever its own shell had set for children
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def _on_usr1(self, signum, frame):
        self._asked = True

    def stop_agreed(self):
        """True on all ranks as soon as one of them was asked to stop."""
        flag = torch.tensor([int(self._asked)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())
