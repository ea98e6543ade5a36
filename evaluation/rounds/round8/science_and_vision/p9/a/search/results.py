import json


class ResultBoard:
    def __init__(self, store):
        self.store = store

    def publish(self, number, **row):
        self.store.set(f"trial/{number}", json.dumps({"number": number, **row}))

    def fetch(self, number):
        return json.loads(self.store.get(f"trial/{number}"))
