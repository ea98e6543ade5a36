import json
import os
import pathlib
from types import SimpleNamespace


def merge(base, over):
    out = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = merge(out[key], value)
        else:
            out[key] = value
    return out


def load(path):
    path = pathlib.Path(path)
    cfg = json.loads(path.read_text())
    base = cfg.pop("_base_", None)
    return merge(load(path.parent / base), cfg) if base else cfg


def to_ns(tree):
    return SimpleNamespace(**{k: to_ns(v) if isinstance(v, dict) else v for k, v in tree.items()})


def host_config(rank, root="conf/hosts"):
    """Settings of the machine this process is placed on."""
    per_host = int(os.environ.get("GPUS_PER_HOST", 2))
    return to_ns(load(f"{root}/node{rank // per_host}.json"))
