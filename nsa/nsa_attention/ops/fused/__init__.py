"""The attention operations as Triton kernels."""

MAX_WIDTH = 256  # the largest width of keys and values
MAX_HEADS_PER_GROUP = 64  # the most query heads that share a key head
