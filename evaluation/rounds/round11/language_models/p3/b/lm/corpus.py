"""A small synthetic corpus: words made of syllables, with topics per document."""
import random

ALPHABET = "abdegiklmnoprstu"
SYLLABLES = [c + v for c in "bdgklmnprst" for v in "aeiou"]


def make_corpus(n_docs, seed):
    rng = random.Random(seed)
    topics = []
    for _ in range(6):
        lexicon = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(25)]
        topics.append(lexicon)
    docs = []
    for _ in range(n_docs):
        lexicon = rng.choice(topics)
        docs.append(" ".join(rng.choices(lexicon, k=rng.randint(8, 22))))
    return docs


def shard(docs, rank, world):
    return docs[rank::world]


class TokenBlocks:
    """The encoded corpus cut into blocks, dealt out to the ranks batch by batch."""

    def __init__(self, tokenizer, docs, block, batch, rank, world):
        stream = []
        for doc in docs:
            stream.extend(tokenizer.encode(doc))
        self.block, self.batch = block, batch
        self.rank, self.world = rank, world
        self.stream = stream
        self.n_blocks = (len(stream) - 1) // block

    def __len__(self):
        return self.n_blocks // (self.batch * self.world)

    def __iter__(self):
        for step in range(len(self)):
            first = (step * self.world + self.rank) * self.batch
            rows = range(first, first + self.batch)
            yield [self.stream[r * self.block : r * self.block + self.block + 1] for r in rows]
