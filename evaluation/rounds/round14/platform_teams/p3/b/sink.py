"""Metrics leave the training loop through a bounded queue; one thread owns the file."""
import json
import queue
import threading
from pathlib import Path


class JsonlSink:
    _END = object()

    def __init__(self, path, depth=16):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.queue = queue.Queue(maxsize=depth)
        self.thread = threading.Thread(target=self._drain, name="metrics-sink", daemon=True)
        self.thread.start()

    def _drain(self):
        with self.path.open("w") as fh:
            while True:
                record = self.queue.get()
                if record is self._END:
                    return
                fh.write(json.dumps(record) + "\n")
                fh.flush()

    def emit(self, record):
        self.queue.put(record)

    def close(self):
        self.queue.put(self._END)
        self.thread.join()


class NullSink:
    def emit(self, record):
        pass

    def close(self):
        pass
