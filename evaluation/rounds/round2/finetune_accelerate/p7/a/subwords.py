"""A small trainable subword tokenizer that keeps count of what it sees."""
import collections
import threading
import time


class SubwordTokenizer:
    PAD, UNK, SEP = 0, 1, 2

    def __init__(self, max_piece=4):
        self.max_piece = max_piece
        self.pieces = {"<pad>": 0, "<unk>": 1, "<sep>": 2}
        self.counts = collections.Counter()
        self._memo = {}
        self._lock = threading.Lock()

    def __len__(self):
        return len(self.pieces)

    def train(self, texts, limit):
        for text in texts:
            for word in text.split():
                for n in range(1, self.max_piece + 1):
                    self.counts.update(word[i: i + n] for i in range(len(word) - n + 1))
        for piece, _ in sorted(self.counts.items(), key=lambda kv: (-kv[1], kv[0]))[:limit]:
            self.pieces.setdefault(piece, len(self.pieces))
        return self

    def _split(self, word):
        out, i = [], 0
        while i < len(word):
            for n in range(self.max_piece, 0, -1):
                if word[i: i + n] in self.pieces:
                    break
            out.append(self.pieces.get(word[i: i + n], self.UNK))
            i += n
        return out

    def encode(self, text):
        ids = []
        for word in text.split():
            with self._lock:
                if word not in self._memo:
                    self._memo[word] = self._split(word)
                ids += self._memo[word]
                self.counts[word] += 1
        return ids + [self.SEP]

    def write_frequencies(self, path, rows_per_flush=25, pause=0.02):
        """One line a piece, the most frequent ones first; slowly, for the sake of the shared disk."""
        with self._lock, open(path, "w") as f:
            for row, (piece, n) in enumerate(self.counts.most_common(), 1):
                f.write(f"{piece}\t{n}\n")
                if row % rows_per_flush == 0:
                    f.flush()
                    time.sleep(pause)
