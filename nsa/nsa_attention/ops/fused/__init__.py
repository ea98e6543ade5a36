"""The attention operations as Triton kernels. Nothing here is imported before a fused kernel is asked for."""

MAX_WIDTH = 256  # of keys and values
MAX_HEADS_PER_GROUP = 64  # query heads that share a key head
