import json
import os

PAD = 0


class Vocab:
    """Item ids, most frequent first; 0 is the padding."""

    def __init__(self, table):
        self.table = table

    def __len__(self):
        return len(self.table) + 1

    def __getitem__(self, item):
        return self.table[item]

    @classmethod
    def build(cls, events):
        count = {}
        for e in events:
            count[e.item] = count.get(e.item, 0) + 1
        order = sorted(count, key=lambda i: (-count[i], i))
        return cls({item: k + 1 for k, item in enumerate(order)})

    def save(self, path):
        with open(path + ".part", "w") as fh:
            json.dump(self.table, fh)
        os.replace(path + ".part", path)

    @classmethod
    def load(cls, path):
        with open(path) as fh:
            return cls(json.load(fh))
