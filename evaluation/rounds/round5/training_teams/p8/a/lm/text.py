import random
import string


class Corpus:
    """Made-up sentences of very different lengths."""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.docs = []
        for _ in range(n):
            words = rng.randint(2, 14) if rng.random() < 0.8 else rng.randint(20, 40)
            self.docs.append(" ".join(
                "".join(rng.choices(string.ascii_lowercase[:6], k=rng.randint(1, 4))) for _ in range(words)))
        self.ids = [[1] + [3 + ord(c) - 97 if c != " " else 2 for c in d] for d in self.docs]

    def __len__(self):
        return len(self.docs)

    def lengths(self):
        return [len(i) for i in self.ids]


def preview(corpus, k=3):
    """A few documents for the log."""
    rng = random.Random(k)
    for i in rng.sample(range(len(corpus)), k):
        print(f"  sample {i}: {corpus.docs[i][:50]}", flush=True)
