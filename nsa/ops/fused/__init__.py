"""The attention operations as Triton kernels. Nothing here is imported before a fused kernel is asked for."""
