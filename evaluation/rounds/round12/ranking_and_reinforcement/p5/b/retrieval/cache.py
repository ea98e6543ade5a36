from collections import OrderedDict


class LRU:
    def __init__(self, capacity):
        self.capacity, self.data = capacity, OrderedDict()
        self.hits = self.misses = 0

    def get_or(self, key, make):
        if key in self.data:
            self.hits += 1
            self.data.move_to_end(key)
            return self.data[key]
        self.misses += 1
        value = self.data[key] = make()
        while len(self.data) > self.capacity:
            self.data.popitem(last=False)
        return value
