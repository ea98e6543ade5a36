"""Request / reply protocol between the teacher (rank 0) and its students."""
import torch
import torch.distributed as dist

TEACHER = 0
REQ_SIZE, REQ_IDS, REPLY = 1, 2, 3


def ask(ids, vocab):
    dist.send(torch.tensor([ids.shape[0], ids.shape[1]]), TEACHER, tag=REQ_SIZE)
    dist.send(ids.contiguous(), TEACHER, tag=REQ_IDS)
    logits = torch.empty(ids.shape[0], ids.shape[1], vocab)
    dist.recv(logits, TEACHER, tag=REPLY)
    return logits


def take_request(student):
    shape = torch.zeros(2, dtype=torch.long)
    dist.recv(shape, student, tag=REQ_SIZE)
    ids = torch.empty(*shape.tolist(), dtype=torch.long)
    dist.recv(ids, student, tag=REQ_IDS)
    return ids


def answer(student, logits):
    dist.send(logits.contiguous(), student, tag=REPLY)
