"""Every rank fails to read its data once, catches that, reads again, and goes on."""

import logging

from _job import Trainer, begin, end

LABEL = {"verdict": "PASS"}


class Storage:
    def __init__(self) -> None:
        self.asked = 0

    def read(self) -> None:
        self.asked += 1
        if self.asked == 3:
            raise OSError("storage is away")


begin()
trainer, storage = Trainer(), Storage()
for _ in range(5):
    try:
        storage.read()
    except OSError:
        logging.exception("reading again")
        storage.read()
    trainer.step()
end()
