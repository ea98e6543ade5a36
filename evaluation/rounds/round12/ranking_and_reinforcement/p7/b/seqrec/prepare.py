import os

from .log import read_log, write_log
from .vocab import Vocab


def prepare(cfg):
    """Done once, before training: the log and the vocabulary."""
    write_log(cfg["log"])
    events = read_log(cfg["log"])
    newest = max(e.day for e in events)
    vocab = Vocab.build(e for e in events if newest - e.day < cfg["fresh_days"])
    vocab.save(os.path.join(cfg["folder"], "vocab.json"))
    return len(vocab)
