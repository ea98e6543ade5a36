"""The subject: a Native Sparse Attention language model and its training program. Knows nothing of the harness."""
