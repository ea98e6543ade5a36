import queue
import random
import threading
import zlib

import torch

_END = object()


def _bucket(field, value, n):
    return zlib.crc32(("%s=%s" % (field, value)).encode("utf-8")) % n


class StreamReader:
    """Reads blocks in a background thread and hands out ready batches."""

    def __init__(self, blocks, batch_size, buckets, seed=0, depth=8):
        self.blocks = list(blocks)
        self.batch_size = batch_size
        self.buckets = buckets
        self.seed = seed
        self.depth = depth

    def parse(self, raw):
        click, user, item, title, price = raw.decode("utf-8").rstrip("\n").split("\t")
        word = title.split(" ")[0]
        ids = [_bucket("u", user, self.buckets), _bucket("i", item, self.buckets),
               _bucket("t", word, self.buckets)]
        return ids, float(price) / 100.0, float(click)

    def _lines(self, order):
        for b in order:
            with open(b.path, "rb") as f:
                f.seek(b.offset)
                for _ in range(b.lines):
                    yield f.readline()

    def _collate(self, rows):
        ids, price, y = zip(*rows)
        return torch.tensor(ids), torch.tensor(price), torch.tensor(y)

    def _produce(self, order, out):
        try:
            rows = []
            for raw in self._lines(order):
                rows.append(self.parse(raw))
                if len(rows) == self.batch_size:
                    out.put(self._collate(rows))
                    rows = []
            if rows:
                out.put(self._collate(rows))
            out.put(_END)
        except Exception as e:  # handed to the consumer
            out.put(e)

    def batches(self, epoch):
        order = list(self.blocks)
        if epoch > 0:
            random.Random(self.seed * 100 + epoch).shuffle(order)
        out = queue.Queue(maxsize=self.depth)
        t = threading.Thread(target=self._produce, args=(order, out), daemon=True)
        t.start()
        while True:
            got = out.get()
            if got is _END:
                break
            if isinstance(got, Exception):
                raise got
            yield got
        t.join()
