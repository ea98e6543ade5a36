"""Toy passage corpus: each topic has its own vocabulary, passages mix topics."""
import numpy as np
import torch

# share of the corpus the index of version 0, 1, 2, ... may hold; the easy
# (short, single-topic) passages come first
VISIBLE = (0.4, 0.6, 0.75, 1.0)


class Corpus:
    def __init__(self, docs=1000, queries=640, topics=25, vocab=1500, length=24, seed=0):
        rng = np.random.default_rng(seed)
        lex = rng.integers(vocab, size=(topics, 60))
        main = rng.integers(topics, size=docs)
        mix = np.sort(rng.random(docs) * 0.6)
        self.docs = np.empty((docs, length), dtype=np.int64)
        for d in range(docs):
            other = rng.integers(topics, size=length)
            topic = np.where(rng.random(length) < mix[d], other, main[d])
            self.docs[d] = lex[topic, rng.integers(60, size=length)]
        # a query is a handful of words of its passage; most ask for the early ones
        self.gold = (rng.random(queries) ** 1.5 * docs).astype(np.int64)
        take = rng.integers(length, size=(queries, 6))
        self.queries = np.take_along_axis(self.docs[self.gold], take, 1)
        self.vocab = vocab
        self.n_train = int(queries * 0.8)

    def visible(self, version):
        share = VISIBLE[min(version, len(VISIBLE) - 1)]
        return np.arange(int(len(self.docs) * share))

    def doc_tokens(self, ids):
        return torch.from_numpy(self.docs[ids])

    def query_tokens(self, ids):
        return torch.from_numpy(self.queries[ids])
