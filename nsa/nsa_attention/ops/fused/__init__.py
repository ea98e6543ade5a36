"""The attention operations as Triton kernels. Nothing here is imported before a fused kernel is asked for."""

WIDEST = 256  # of keys and values
MOST_HEADS = 64  # query heads that share a key head
