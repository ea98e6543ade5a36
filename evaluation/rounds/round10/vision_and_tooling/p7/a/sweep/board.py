"""Parameters and results of trials, shared through the key-value store of the job."""
import json


class Board:
    def __init__(self, store, group):
        self.store = store
        self.group = group

    def _key(self, trial, what):
        return f"sweep/g{self.group}/t{trial}/{what}"

    def publish(self, trial, params):
        self.store.set(self._key(trial, "params"), json.dumps(params))

    def params(self, trial):
        return json.loads(self.store.get(self._key(trial, "params")))
