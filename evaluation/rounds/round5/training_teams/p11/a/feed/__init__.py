from .prefetch import Prefetcher
from .shards import shard_paths, write_shards
