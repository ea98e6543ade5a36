"""Prompts of the customer, split over the students."""
import torch

VOCAB = 64
LENGTH = 10


def prompts(n=141, seed=13):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    return (start + 3 * torch.arange(LENGTH)) % VOCAB


def student_share(ids, student, n_students):
    return ids[student::n_students]


def batches(ids, size, drop_last=False):
    end = len(ids) // size * size if drop_last else len(ids)
    for s in range(0, end, size):
        yield ids[s:s + size]


def count_batches(n, size, drop_last=True):
    return n // size if drop_last else -(-n // size)
