import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class DataSettings:
    words: int = 300
    documents: int = 240
    length: int = 32
    topics: int = 6
    min_count: int = 2
    lowercase: bool = True
    seed: int = 19


def fingerprint(settings):
    """A short name for everything that the prepared data depends on."""
    text = json.dumps(asdict(settings), sort_keys=True)
    return hashlib.sha1(text.encode()).hexdigest()[:12]
