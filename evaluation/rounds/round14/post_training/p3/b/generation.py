from dataclasses import dataclass

import torch


@dataclass
class GenerationConfig:
    max_new_tokens: int = 8
    temperature: float = 1.0
    eos_id: int = 1
    pad_id: int = 0


@torch.no_grad()
def generate(model, prompts, config, generator):
    """Samples until every sequence has emitted EOS; returns ids and a mask of the sampled tokens."""
    ids = prompts.clone()
    done = torch.zeros(len(prompts), dtype=torch.bool)
    mask = torch.zeros_like(prompts, dtype=torch.float)
    for _ in range(config.max_new_tokens):
        logits = model(ids[:, -model.window:])[:, -1] / config.temperature
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
        token = torch.where(done, torch.full_like(token, config.pad_id), token)
        ids = torch.cat([ids, token.unsqueeze(1)], 1)
        mask = torch.cat([mask, (~done).float().unsqueeze(1)], 1)
        done = done | (token == config.eos_id)
        if done.all():
            break
    return ids, mask
