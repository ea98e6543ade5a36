"""What rank 0 registered to run at exit reads a file that the program itself has removed."""

import atexit
import tempfile
from pathlib import Path

from _job import FAULT, Trainer, begin, end

LABEL = {"verdict": "PASS", "cause": "dirty_exit", "culprit": [0]}


class Journal:
    def __init__(self) -> None:
        self.file = Path(tempfile.mkdtemp()) / "journal.txt"
        self.file.write_text("begun\n")
        atexit.register(self.close)

    def close(self) -> None:
        print(self.file.read_text() + "ended")  # to blame
        self.file.unlink()
        self.file.parent.rmdir()


rank, _ = begin()
journal = Journal()
trainer = Trainer()
for _ in range(3):
    trainer.step()
end()
if FAULT and rank == 0:
    journal.file.unlink()
