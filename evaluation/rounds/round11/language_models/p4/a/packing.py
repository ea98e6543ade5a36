"""Greedy packing of chat examples into rows of fixed length, and a resumable loader."""
import random

import torch

PAD, BOS, SEP, EOS = 0, 1, 2, 3
IGNORE = -100


def make_chats(n, vocab, seed):
    rng = random.Random(seed)
    chats = []
    for _ in range(n):
        topic = rng.randrange(4, vocab - 8)
        prompt = [topic + rng.randrange(8) for _ in range(rng.randint(2, 9))]
        answer = [topic + (t - topic + 1) % 8 for t in prompt[: rng.randint(2, 9)]]
        chats.append((prompt, answer))
    return chats


def render(chat):
    prompt, answer = chat
    ids = [BOS, *prompt, SEP, *answer, EOS]
    labels = [IGNORE] * (len(prompt) + 2) + answer + [EOS]
    return ids, labels


def pack(chats, length):
    """First-fit packing; each row holds ids, labels and positions that restart per chat."""
    rows, room = [], []
    for chat in sorted(chats, key=lambda c: -(len(c[0]) + len(c[1]))):
        ids, labels = render(chat)
        for k, free in enumerate(room):
            if len(ids) <= free:
                break
        else:
            k = len(rows)
            rows.append(([], [], []))
            room.append(length)
        rows[k][0].extend(ids)
        rows[k][1].extend(labels)
        rows[k][2].extend(range(len(ids)))
        room[k] -= len(ids)
    out = []
    for (ids, labels, pos), free in zip(rows, room):
        out.append((ids + [PAD] * free, labels + [IGNORE] * free, pos + [0] * free))
    return torch.tensor(out)


class PackedLoader:
    """Endless batches of packed rows; each epoch has its own order."""

    def __init__(self, rows, batch, seed):
        self.rows, self.batch, self.seed = rows, batch, seed
        self.epoch, self.cursor = 0, 0
        self.order = self._shuffle()

    def _shuffle(self):
        gen = torch.Generator().manual_seed(self.seed + 977 * self.epoch)
        return torch.randperm(len(self.rows), generator=gen).tolist()

    def next_batch(self):
        picked = []
        while len(picked) < self.batch:
            if self.cursor == len(self.order):
                self.epoch, self.cursor = self.epoch + 1, 0
                self.order = self._shuffle()
            picked.append(self.order[self.cursor])
            self.cursor += 1
        return self.rows[picked]

    def state_dict(self):
        return {"epoch": self.epoch, "cursor": self.cursor}

    def load_state_dict(self, state):
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self.order = self._shuffle()
