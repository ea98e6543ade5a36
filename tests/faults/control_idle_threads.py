"""Daemon threads wait for work that never comes; that is what they are there for."""

import queue
import threading

from _job import Trainer, begin, end

LABEL = {"verdict": "PASS"}

wakeup, inbox = threading.Condition(), queue.Queue()


def listen() -> None:
    with wakeup:
        wakeup.wait()


begin()
for work in (inbox.get, listen, threading.Event().wait):
    threading.Thread(target=work, daemon=True).start()
trainer = Trainer()
for _ in range(5):
    trainer.step()
end()
