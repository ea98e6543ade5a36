import json
import os
from dataclasses import dataclass, field


@dataclass
class SearchState:
    rung: int = 0
    alive: list = field(default_factory=list)
    history: list = field(default_factory=list)


def load_state(path, n):
    """The state of an earlier run of the search, or a fresh one."""
    if path and os.path.exists(path):
        with open(path) as f:
            return SearchState(**json.load(f))
    return SearchState(alive=list(range(n)))
