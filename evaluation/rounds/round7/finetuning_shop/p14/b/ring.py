"""Prefetching into a fixed ring of reusable buffers."""
import queue
import threading


class Ring:
    def __init__(self, slots, make_buffer):
        self.free = queue.Queue()
        self.ready = queue.Queue()
        for _ in range(slots):
            self.free.put(make_buffer())

    def take_free(self):
        return self.free.get()

    def give_back(self, buf):
        self.free.put(buf)


class Prefetcher:
    """Fills buffers in a thread: fill(buf, k) says whether sample group k is usable."""

    def __init__(self, ring, fill, order):
        self.ring = ring
        self.fill = fill
        self.order = order
        self.dropped = 0
        threading.Thread(target=self._produce, daemon=True).start()

    def _produce(self):
        for k in self.order:
            buf = self.ring.take_free()
            if not self.fill(buf, k):
                self.dropped += 1
                continue
            self.ring.ready.put(buf)

    def __iter__(self):
        while True:
            buf = self.ring.ready.get()
            yield buf
            self.ring.give_back(buf)
