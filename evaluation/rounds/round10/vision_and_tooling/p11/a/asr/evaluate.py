import logging

import torch
import torch.distributed as dist

from .text import decode_greedy, normalise
from .wer import utterance_wer

log = logging.getLogger("asr.eval")


class RunningWer:
    """Mean utterance WER over all ranks, kept up to date batch by batch for the progress line."""

    def __init__(self):
        self.total = torch.zeros(2)

    def update(self, scores):
        part = torch.tensor([sum(scores), len(scores)], dtype=torch.float32)
        dist.all_reduce(part)
        self.total += part

    @property
    def value(self):
        return (self.total[0] / self.total[1].clamp(min=1)).item()


def views(x):
    """Test-time augmentation: the input as it is and two smoothed versions of it."""
    yield x
    for w in (0.2, 0.35):
        y = x.clone()
        y[:, 1:-1] = (1 - w) * x[:, 1:-1] + w / 2 * (x[:, :-2] + x[:, 2:])
        yield y


@torch.no_grad()
def evaluate(model, loader, every=4):
    model.eval()
    wer, samples = RunningWer(), []
    for n, (x, xlen, _, _, texts) in enumerate(loader):
        try:
            logp = sum(model(v) for v in views(x)) / 3
            best = logp.argmax(-1)
            scores = []
            for b, text in enumerate(texts):
                hyp = normalise(decode_greedy(best[b, :xlen[b]].tolist()))
                scores.append(utterance_wer(normalise(text), hyp))
                samples.append((text, " ".join(hyp)))
            wer.update(scores)
        except Exception as e:
            log.warning("batch %d could not be scored (%s)", n, type(e).__name__)
            continue
        if n % every == 0 and dist.get_rank() == 0:
            log.info("  batch %d running wer %.3f", n, wer.value)
    model.train()
    shown = [None] * dist.get_world_size()
    dist.all_gather_object(shown, samples[0])
    return wer.value, shown
