import queue
import threading


class _End:
    pass


class Prefetcher:
    """Reads ahead in a thread of its own, so that the disk is never waited for."""

    def __init__(self, source, depth=4):
        self.source = source
        self.queue = queue.Queue(maxsize=depth)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def _put(self, item):
        while not self.stop.is_set():
            try:
                self.queue.put(item, timeout=0.5)
                return True
            except queue.Full:
                pass
        return False

    def _run(self):
        for batch in self.source:
            if not self._put(batch):
                return
        self._put(_End())

    def __iter__(self):
        self.thread.start()
        try:
            while True:
                item = self.queue.get()
                if isinstance(item, _End):
                    return
                yield item
        finally:
            self.stop.set()
