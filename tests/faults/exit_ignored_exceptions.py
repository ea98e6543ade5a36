"""Exceptions in destructors and in a helper thread are printed and ignored; training does not need them."""

import threading

from _job import FAULT, STEPS, Trainer, begin, end

LABEL = {"verdict": "PASS"}


class Handle:
    def __del__(self) -> None:
        if FAULT:
            raise RuntimeError("already closed")


def telemetry() -> None:
    if FAULT:
        raise ConnectionError("the telemetry server is not there")


begin()
trainer = Trainer()
helper = threading.Thread(target=telemetry)
helper.start()
helper.join()
for _ in range(STEPS):
    Handle()
    trainer.step()
end()
