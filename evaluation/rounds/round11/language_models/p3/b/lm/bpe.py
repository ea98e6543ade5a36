"""Byte-pair tokenizer trained by all ranks together, each on its part of the corpus."""
from collections import Counter

import torch.distributed as dist


def split_words(docs):
    words = Counter()
    for doc in docs:
        words.update(doc.split())
    return {tuple(w) + ("</w>",): n for w, n in words.items()}


def merge_symbols(symbols, pair):
    out, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            out.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return tuple(out)


def local_pairs(words):
    pairs = Counter()
    for symbols, n in words.items():
        for pair in zip(symbols, symbols[1:]):
            pairs[pair] += n
    return pairs


class BPE:
    def __init__(self):
        self.merges = []
        self.vocab = {}

    def train(self, docs, n_merges, alphabet, min_count=2):
        words = split_words(docs)
        world = dist.get_world_size()
        for _ in range(n_merges):
            mine = local_pairs(words)
            parts = [None] * world
            dist.all_gather_object(parts, mine)
            total = Counter(mine)
            for other, part in enumerate(parts):
                if other != dist.get_rank():
                    total.update(part)
            best = max(total, key=total.get)
            if total[best] < min_count:
                break
            self.merges.append(best)
            words = {merge_symbols(s, best): n for s, n in words.items()}
        symbols = list(alphabet) + ["</w>"] + ["".join(m) for m in self.merges]
        self.vocab = {s: i for i, s in enumerate(dict.fromkeys(symbols))}
        return self

    def encode_word(self, word):
        symbols = tuple(word) + ("</w>",)
        for pair in self.merges:
            if len(symbols) == 1:
                break
            symbols = merge_symbols(symbols, pair)
        return [self.vocab[s] for s in symbols]

    def encode(self, doc, cache={}):
        ids = []
        for word in doc.split():
            if word not in cache:
                cache[word] = self.encode_word(word)
            ids.extend(cache[word])
        return ids
