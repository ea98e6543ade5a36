import torch
import torch.nn.functional as F

from evalkit.metrics import Perplexity, gather_ragged
from evalkit.shard import shard_documents


@torch.no_grad()
def evaluate(model, docs, rank, world, window):
    """Perplexity over the documents and the per-document mean losses of all ranks."""
    model.eval()
    ppl, means = Perplexity(), []
    for i in shard_documents(sorted(docs), rank, world):
        tokens = docs[i]
        losses = []
        for start in range(0, len(tokens) - 1, window):
            chunk = tokens[start:start + window + 1]
            logits = model(chunk[None, :-1])[0]
            losses.append(F.cross_entropy(logits, chunk[1:], reduction="none"))
        losses = torch.cat(losses)
        ppl.add(losses)
        means.append(losses.mean())
    per_doc = gather_ragged(torch.stack(means))
    model.train()
    return ppl.reduce(), per_doc
