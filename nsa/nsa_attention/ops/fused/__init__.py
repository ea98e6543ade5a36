"""The attention operations as Triton kernels. The modules are imported only when a fused kernel is requested."""

MAX_WIDTH = 256  # the largest width of keys and values
MAX_HEADS_PER_GROUP = 64  # the most query heads that share a key head
