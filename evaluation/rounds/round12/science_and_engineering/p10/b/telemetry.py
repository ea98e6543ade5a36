import json
import threading
import time


class Telemetry:
    """Collects metrics from the loop and from a background sampler, writes them in blocks."""

    def __init__(self, path, block=16):
        self.path = path
        self.block = block
        self.rows = []
        self.written = 0
        self._lock = threading.Lock()
        open(path, "w").close()

    def record(self, name, value, step):
        row = {"t": round(time.time(), 3), "step": step, "name": name, "value": float(value)}
        with self._lock:
            self.rows.append(row)
            if len(self.rows) >= self.block:
                self.flush()

    def flush(self):
        with self._lock:
            with open(self.path, "a") as f:
                for row in self.rows:
                    f.write(json.dumps(row) + "\n")
            self.written += len(self.rows)
            self.rows.clear()


class Sampler(threading.Thread):
    """Records the load of the host every now and then."""

    def __init__(self, telemetry, period=0.5):
        super().__init__(daemon=True)
        self.telemetry, self.period = telemetry, period
        self.stop_event = threading.Event()

    def run(self):
        while not self.stop_event.wait(self.period):
            with open("/proc/loadavg") as f:
                self.telemetry.record("host/load", f.read().split()[0], step=-1)

    def stop(self):
        self.stop_event.set()
        self.join()
