import numpy as np
import torch


class Corpus:
    """Documents in topics; every trainer embeds its own slice of them."""

    def __init__(self, docs, dim, topics, seed):
        rng = np.random.default_rng(seed)
        self.topic = torch.from_numpy(np.arange(docs) % topics)
        centre = rng.normal(size=(topics, dim))
        noise = rng.normal(size=(docs, dim)) * 0.6
        self.feat = torch.tensor(centre[self.topic.numpy()] + noise, dtype=torch.float32)

    def slice(self, rank, world):
        size = len(self.feat) // world
        return self.feat[rank * size:(rank + 1) * size]


class QueryStream:
    """Queries come in sessions: a session asks about one topic for a while."""

    def __init__(self, corpus, batch, session, seed):
        self.corpus, self.batch, self.session = corpus, batch, session
        self.rng = np.random.default_rng(seed)
        self.topics = int(corpus.topic.max()) + 1

    def __iter__(self):
        step = 0
        while True:
            if step % self.session == 0:
                topic = int(self.rng.integers(self.topics))
            pool = np.flatnonzero(self.corpus.topic.numpy() == topic)
            pos = self.rng.choice(pool, self.batch)
            noise = torch.from_numpy(self.rng.normal(size=(self.batch, self.corpus.feat.shape[1]))).float()
            yield step, topic, self.corpus.feat[pos] + 0.3 * noise, torch.from_numpy(pos)
            step += 1
