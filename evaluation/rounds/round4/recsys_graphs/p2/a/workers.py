"""Tiny helper processes.

A worker is a forked child with a feed and a result pipe.  It serves jobs until
its feed is closed, like a unix filter does.
"""
import multiprocessing as mp

_ctx = mp.get_context("fork")


class Worker:
    def __init__(self, fn, name):
        feed_r, self.feed = _ctx.Pipe(duplex=False)
        self.results, results_w = _ctx.Pipe(duplex=False)
        self.proc = _ctx.Process(target=self._serve, args=(fn, feed_r, results_w), name=name, daemon=True)
        self.proc.start()
        feed_r.close()
        results_w.close()

    def _serve(self, fn, feed_r, results_w):
        # our copies of the parent's ends
        self.feed.close()
        self.results.close()
        while True:
            try:
                job = feed_r.recv()
            except EOFError:
                return
            results_w.send(fn(job))

    def submit(self, job):
        self.feed.send(job)

    def result(self):
        return self.results.recv()

    def close(self):
        self.feed.close()
        self.proc.join()
        self.results.close()


class LazyWorker:
    """Starts its process on first use; short debugging runs never pay for it."""

    def __init__(self, make_fn, name):
        self.make_fn, self.name, self.worker, self.open_jobs = make_fn, name, None, 0

    def submit(self, job):
        if self.worker is None:
            self.worker = Worker(self.make_fn(), self.name)
        self.worker.submit(job)
        self.open_jobs += 1

    def drain(self):
        got = []
        while self.open_jobs:
            got.append(self.worker.result())
            self.open_jobs -= 1
        return got

    def close(self):
        if self.worker is not None:
            self.worker.close()
