"""Hook registry. Anything that is not the training step itself hangs off an event."""
import collections
import logging

log = logging.getLogger("nightjar.hooks")

EVENTS = ("fit_start", "micro_end", "step_end", "fit_end")


class HookRegistry:
    def __init__(self):
        self._hooks = collections.defaultdict(list)
        self.failures = collections.Counter()

    def add(self, event, fn, priority=50, name=None):
        if event not in EVENTS:
            raise ValueError(f"unknown event {event!r}")
        self._hooks[event].append((priority, name or fn.__qualname__, fn))
        self._hooks[event].sort(key=lambda h: h[0])

    def fire(self, event, trainer, **info):
        for _, name, fn in self._hooks[event]:
            try:
                fn(trainer, **info)
            except Exception as exc:
                # a broken dashboard must never take a week-long run down
                self.failures[name] += 1
                log.warning("hook %s failed on %s: %s", name, event, exc)
