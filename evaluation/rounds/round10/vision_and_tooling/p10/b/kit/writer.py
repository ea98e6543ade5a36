import json
import queue
import threading


class AsyncScalarWriter:
    """Writes scalars from a thread of its own, so that training does not wait for the disk."""

    def __init__(self, path):
        self._q = queue.Queue()
        self._file = open(path, "w")
        self._thread = threading.Thread(target=self._drain, name="scalar-writer")
        self._thread.start()

    def _drain(self):
        while True:
            item = self._q.get()
            if item is None:
                break
            self._file.write(json.dumps(item) + "\n")
        self._file.close()

    def add(self, tag, value, step):
        self._q.put({"tag": tag, "value": value, "step": step})

    def close(self):
        self._q.put(None)
        self._thread.join()
