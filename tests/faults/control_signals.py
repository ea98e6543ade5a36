"""The program has signal handlers of its own, and uses them."""

import os
import signal

from _job import Trainer, begin, end

LABEL = {"verdict": "PASS"}

heard = []
begin()
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM):
    signal.signal(number, lambda which, _: heard.append(which))
trainer = Trainer()
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
for _ in range(5):
    os.kill(os.getpid(), signal.SIGUSR2)
    trainer.step()
signal.setitimer(signal.ITIMER_REAL, 0)
if signal.SIGUSR2 not in heard:
    raise SystemExit("a signal was lost")
end()
