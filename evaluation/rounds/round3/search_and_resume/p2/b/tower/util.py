import logging
import threading
import time
from pathlib import Path

import torch.distributed as dist


def get_logger(name):
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank{dist.get_rank()} %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


class Heartbeat(threading.Thread):
    """Touches a file that the node agent looks at."""

    def __init__(self, path, every=0.5):
        super().__init__(name="heartbeat", daemon=True)
        self.path, self.every = Path(path), every
        self.quit = threading.Event()

    def run(self):
        while not self.quit.wait(self.every):
            self.path.write_text(f"{time.time():.1f}\n")

    def stop(self):
        self.quit.set()
        self.join()
