"""A model decodes from pages by the fused kernels as it does in plain torch, where it is to and where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa_attention.config import ALL_BRANCHES, Branch, Implementation, NSAConfig
from nsa_attention.decode import new_caches, next_logits, step
from nsa_attention.model import TinyLM
from nsa_attention.ops.fused.launch import launches


@pytest.mark.parametrize(
    "branches",
    [ALL_BRANCHES, pytest.param((Branch.SEL,), marks=pytest.mark.slow)],
    ids=lambda subset: "+".join(subset),
)
def test_a_model_decodes_by_the_kernels_as_by_torch(tiny: NSAConfig, branches: tuple[Branch, ...]) -> None:
    config = replace(tiny, layers=1, branches=branches, d_k=16, d_v=16)
    model = TinyLM.from_config(config, Implementation.TRITON).double()
    plain = TinyLM.from_config(config, Implementation.EAGER).double()
    plain.load_state_dict(model.state_dict())
    inputs, before = torch.randint(config.vocab, (2, 24)), launches["cached_output"]
    caches = new_caches(model, 2, pages=40, page_size=5), new_caches(plain, 2)
    done = 0
    for size in (1, 9, *[1] * 14):
        ours, theirs = (
            step(one, inputs[:, done : done + size], cache) for one, cache in zip((model, plain), caches, strict=True)
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        done += size
    assert launches["cached_output"] == before + 16  # a chunk of tokens is one launch
    assert list(model.blocks[0].attn.gate_mlp.runs)[-1].name == "triton"
    logits = next_logits(model, {1: inputs[1, :1]}, caches[0])
    assert logits.shape == (1, config.vocab)


def test_plain_torch_is_taken_unasked_on_a_cpu(tiny: NSAConfig) -> None:
    model, before = TinyLM.from_config(tiny), launches["cached_output"]
    cache = new_caches(model, 1, pages=10)
    for token in (1, 2, 3):
        step(model, torch.tensor([[token]]), cache)
    assert launches["cached_output"] == before
    assert [used.name for used in model.blocks[0].attn.gate_mlp.runs] == ["eager"]


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_are_taken_unasked(tiny: NSAConfig) -> None:
    """With the choice of blocks left out: float32 on both ways need not choose alike."""
    config = replace(tiny, d_k=16, d_v=16, select_count=8)
    model, plain = (TinyLM.from_config(config, one) for one in (Implementation.AUTO, Implementation.EAGER))
    plain.load_state_dict(model.state_dict())
    inputs = torch.randint(config.vocab, (2, 40), device="cuda")
    model, plain = model.cuda(), plain.cuda()
    ours, theirs = (
        torch.cat([step(one, token, caches) for token in inputs.split(1, 1)], 1)
        for one, caches in ((model, new_caches(model, 2, pages=40)), (plain, new_caches(plain, 2)))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert [used.name for used in model.blocks[0].attn.gate_mlp.runs] == ["triton"]
