from .loader import make_loader
from .tario import iter_tar, write_shards

__all__ = ["make_loader", "iter_tar", "write_shards"]
