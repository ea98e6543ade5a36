import os
import time

import torch

from prepare import build, save
from settings import fingerprint


class PreparedData:
    """Rank 0 prepares the data once; the other ranks of the job read its file.

    Preparation may take longer than the collectives' timeout on real corpora, so the
    ranks look for the file instead of meeting in a barrier.
    """

    def __init__(self, root, run_id, poll=0.2):
        self.root = os.path.join(root, run_id)
        self.poll = poll

    def path(self, settings):
        return os.path.join(self.root, f"prepared-{fingerprint(settings)}.pt")

    def load(self, settings, rank):
        path = self.path(settings)
        if rank == 0 and not os.path.exists(path):
            save(path, build(settings))
        while not os.path.exists(path):
            time.sleep(self.poll)
        return torch.load(path)
