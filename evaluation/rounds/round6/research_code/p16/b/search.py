import json

from trial import build, fit


class Coordinator:
    """Posts the plan of each rung and ranks the trials by their results."""

    def __init__(self, store, params, sizes, state, workers):
        self.store = store
        self.params = params
        self.sizes = sizes
        self.state = state
        self.workers = workers

    def plan(self, rung):
        steps = 20 * 2 ** rung
        return [
            {"trial": t, "worker": self.workers[i % len(self.workers)], "steps": steps, "params": self.params[t]}
            for i, t in enumerate(self.state.alive)
        ]

    def run(self):
        for rung in range(self.state.rung, len(self.sizes)):
            jobs = self.plan(rung)
            self.store.set(f"plan/{rung}", json.dumps(jobs))
            scores = []
            for job in jobs:
                value = json.loads(self.store.get(f"result/{rung}/{job['trial']}"))
                scores.append((value, job["trial"]))
            scores.sort()
            self.state.history += [[t, v] for v, t in scores]
            keep = self.sizes[rung + 1] if rung + 1 < len(self.sizes) else 1
            self.state.alive = [t for _, t in scores[:keep]]
            self.state.rung = rung + 1
            print(f"rung {rung}: {len(jobs)} trials, best {scores[0][0]:.4f} (trial {scores[0][1]})", flush=True)
        return self.state.alive[0]


class Worker:
    """Runs its share of the trials of each rung."""

    def __init__(self, store, rank, sizes, state):
        self.store = store
        self.rank = rank
        self.rungs = range(state.rung, len(sizes))
        self.done = 0

    def run(self):
        for rung in self.rungs:
            jobs = json.loads(self.store.get(f"plan/{rung}"))
            for job in jobs:
                if job["worker"] != self.rank:
                    continue
                score = fit(build(job["params"]), job["params"], job["steps"], seed=job["trial"])
                self.store.set(f"result/{rung}/{job['trial']}", json.dumps(score))
                self.done += 1
