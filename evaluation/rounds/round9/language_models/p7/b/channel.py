"""Ordered messages from rank 0 to the other ranks over the rendezvous store."""
import json
from datetime import timedelta

import torch.distributed as dist


class Channel:
    def __init__(self, name):
        self.name = name
        self.count = 0
        self.store = dist.distributed_c10d._get_default_store()

    def key(self):
        return f"{self.name}/{self.count}"

    def next_key(self):
        key = self.key()
        self.count += 1
        return key

    def publish(self, value):
        self.store.set(self.next_key(), json.dumps(value))

    def fetch(self):
        key = self.next_key()
        self.store.wait([key], timedelta(hours=2))
        return json.loads(self.store.get(key))
