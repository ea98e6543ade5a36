import os

from .log import read_log, write_log
from .vocab import Vocab


def prepare(cfg):
    """Done once, before training: the log and the vocabulary."""
    write_log(cfg["log"])
    events = read_log(cfg["log"])
    vocab = Vocab.build(events)
    vocab.save(os.path.join(cfg["folder"], "vocab.json"))
    return len(vocab)
