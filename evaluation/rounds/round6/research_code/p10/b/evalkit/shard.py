import math


def shard_documents(doc_ids, rank, world):
    """Whole documents for each rank, in order and as even as possible."""
    per_rank = math.ceil(len(doc_ids) / world)
    return list(doc_ids[rank * per_rank:(rank + 1) * per_rank])
