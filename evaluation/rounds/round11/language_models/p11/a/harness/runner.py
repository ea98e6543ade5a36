"""Runs the suite on a sharded model; all ranks step through generation together."""
import torch
import torch.distributed as dist

from . import tasks


@torch.no_grad()
def generate(model, prompts, n_new):
    ids = tasks.left_pad(prompts)
    start = ids.shape[1]
    for _ in range(n_new):
        nxt = model(ids)[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, nxt], 1)
    return ids[:, start:]


def token_hits(output, answer):
    got = output.tolist()
    return sum(a == b for a, b in zip(got, answer)) / len(answer)


def evaluate(model, suite, batch_size):
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    report = {}
    for task in suite:
        tally = torch.zeros(2)
        for batch in tasks.shard_batches(task, batch_size, rank, world):
            n_new = tasks.new_tokens(task, batch)
            outputs = generate(model, [p for p, _ in batch], n_new)
            for out, (_, answer) in zip(outputs, batch):
                tally += torch.tensor([token_hits(out, answer), 1.0])
        dist.all_reduce(tally)
        report[task.name] = (tally[0] / tally[1]).item()
    model.train()
    return report
