"""The examples for other people's models, on tiny shapes: a swapped model computes what it did, and learns."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

EXAMPLES = Path(__file__).resolve().parents[2] / "nsa" / "examples"
LENGTHS = {"block_size": 8, "block_count": 4, "compress_size": 8, "compress_stride": 4, "window": 8}  # reads 32 tokens


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_it_learns(model: nn.Module, loss: Any) -> None:
    """A few steps on one batch lower its loss, and every parameter gets a gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = loss()
    for _ in range(3):
        loss().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert loss() < first


class TestLlama:
    """llama.py with a Llama of transformers."""

    @pytest.fixture(autouse=True)
    def needs_transformers(self) -> None:
        pytest.importorskip("transformers", minversion="5")

    def model(self, **more: Any) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **more))

    def test_the_logits_are_equal_while_every_earlier_token_is_read(self) -> None:
        model, tokens = self.model(rope_theta=500.0).eval().double(), torch.randint(40, (2, 50))
        before = model(tokens).logits
        swapped = example("llama").swap_attention(model, open_gate=60.0, **LENGTHS)
        difference = (swapped(tokens).logits - before).abs().amax((0, 2))
        assert difference[:32].max() < 1e-5
        assert difference[32:].max() > 1e-4

    def test_it_learns(self) -> None:
        model, tokens = example("llama").swap_attention(self.model(), **LENGTHS), torch.randint(40, (2, 40))
        assert_it_learns(model, lambda: model(tokens, labels=tokens).loss)

    def test_it_generates_with_its_cache_what_it_generates_without(self) -> None:
        model = example("llama").swap_attention(self.model().eval(), open_gate=0.0, **LENGTHS)
        tokens, options = torch.randint(40, (2, 37)), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        generated = model.generate(tokens, **options)
        assert generated.shape == (2, 49)
        assert torch.equal(generated, model.generate(tokens, use_cache=False, **options))
        with pytest.raises(NotImplementedError, match="do not support beam search"):
            model.generate(tokens, num_beams=2, **options)

    def test_what_nsa_lacks_is_refused(self) -> None:
        llama, tokens = example("llama"), torch.randint(40, (2, 9))
        with pytest.raises(ValueError, match="attention_bias=False and rope_type='default', got True and 'default'"):
            llama.swap_attention(self.model(attention_bias=True))
        mask = torch.ones(2, 9, dtype=torch.long)
        model = llama.swap_attention(self.model(), **LENGTHS)
        assert model(tokens, attention_mask=mask).logits.isfinite().all()
        mask[0, :3] = 0
        with pytest.raises(ValueError, match="attention_mask: NSA does not support padding"):
            model(tokens, attention_mask=mask)


class Dense(nn.Module):
    """The attention function that torchtitan calls between its projections."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **_: Any) -> Tensor:
        heads_first = (one.transpose(1, 2) for one in (q, k, v))
        attended = functional.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale, enable_gqa=True)
        return attended.transpose(1, 2)


class StandInAttention(nn.Module):
    """The attention of torchtitan 0.3 as far as the example reads it: its attributes, and adjacent rotary pairs."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.qkv_linear, self.wo = nn.Module(), nn.Linear(dim, dim, bias=False)
        for name, heads in (("wq", n_heads), ("wk", n_kv_heads), ("wv", n_kv_heads)):
            setattr(self.qkv_linear, name, nn.Linear(dim, heads * self.head_dim, bias=False))
        self.rope = SimpleNamespace(config=SimpleNamespace(scaling="none", theta=500.0))
        self.inner_attention = Dense()

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        linear = self.qkv_linear
        q, k, v = (one(x).unflatten(2, (-1, self.head_dim)) for one in (linear.wq, linear.wk, linear.wv))
        powers = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        angles = torch.arange(x.shape[1])[:, None] * self.rope.config.theta**-powers
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(one.double().unflatten(3, (-1, 2))) * turns).flatten(3).to(x.dtype)
            for one in (q, k)
        )
        return self.wo(self.inner_attention(q, k, v, scale=None).flatten(2))


class StandInBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(32), StandInAttention(32, 4, 2)

    def forward(self, x: Tensor, attention_masks: Any, positions: Tensor | None) -> Tensor:
        return x + self.attention(self.attention_norm(x), attention_masks, positions)


class StandIn(nn.Module):
    """A model with the module structure of torchtitan's Decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.lm_head = nn.Embedding(40, 32), nn.Linear(32, 40)
        self.layers = nn.ModuleDict({str(number): StandInBlock() for number in range(2)})

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attention_masks: Any = None) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, attention_masks, positions)
        return self.lm_head(x)


def real_llama3() -> nn.Module:
    """Two layers of torchtitan's own debug model, with dense attention that runs on a CPU."""
    from torchtitan.models.llama3 import model_registry

    config = model_registry("debugmodel", attn_backend="varlen").model
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.rope.scaling = "none"
    model = config.build()
    model.init_states()
    for block in model.layers.values():
        block.attention.inner_attention = Dense()
    return model


@pytest.fixture(params=["stand-in", "torchtitan"])
def titan(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    if request.param == "stand-in":
        yield StandIn()
        return
    pytest.importorskip("torchtitan.models.llama3", reason="torchtitan 0.3 is not installed", exc_type=ImportError)
    yield real_llama3()
    for name in [name for name in sys.modules if name.split(".")[0] == "torchtitan"]:
        del sys.modules[name]


class TestTorchtitan:
    """torchtitan_llama3.py with a model of the same structure, and with torchtitan's own where it is installed."""

    def positions(self, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1]).expand(tokens.shape)

    def test_the_logits_are_equal_while_every_earlier_token_is_read(self, titan: nn.Module) -> None:
        tokens = torch.randint(40, (2, 50))
        before = titan(tokens, self.positions(tokens))
        swapped = example("torchtitan_llama3").swap_attention(titan, open_gate=60.0, **LENGTHS)
        difference = (swapped(tokens, self.positions(tokens)) - before).abs().amax((0, 2))
        assert difference[:32].max() < 1e-4
        assert difference[32:].max() > 1e-3

    def test_it_learns(self, titan: nn.Module) -> None:
        model, tokens = example("torchtitan_llama3").swap_attention(titan, **LENGTHS), torch.randint(40, (2, 40))
        assert_it_learns(
            model, lambda: functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        )

    def test_it_generates_with_its_cache_what_it_computes_without(self, titan: nn.Module) -> None:
        module, tokens = example("torchtitan_llama3"), torch.randint(40, (2, 37))
        model = module.swap_attention(titan, open_gate=0.0, **LENGTHS)
        generated = module.generate(model, tokens, 12)
        logits = model(torch.cat((tokens, generated), 1))[:, 36:-1]
        assert torch.equal(generated, logits.argmax(-1))

    def test_packed_documents_are_those_alone(self, titan: nn.Module) -> None:
        model, tokens = example("torchtitan_llama3").swap_attention(titan, **LENGTHS), torch.randint(40, (2, 20))
        starts = SimpleNamespace(cu_seq_q=torch.tensor([0, 13, 20, 40], dtype=torch.int32))
        packed = model(tokens, None, starts)
        alone = [model(part) for part in (tokens[:1, :13], tokens[:1, 13:], tokens[1:])]
        torch.testing.assert_close(packed, torch.cat((torch.cat(alone[:2], 1), alone[2])))

    def test_other_masks_are_refused(self, titan: nn.Module) -> None:
        model = example("torchtitan_llama3").swap_attention(titan, **LENGTHS)
        with pytest.raises(ValueError, match="attention_masks: NSA is causal"):
            model(torch.randint(40, (1, 9)), None, object())

    def test_scaled_rotary_positions_are_refused(self, titan: nn.Module) -> None:
        titan.layers["1"].attention.rope.config.scaling = "llama"
        with pytest.raises(ValueError, match=r"expected rope.scaling 'none' and no q_norm, got 'llama' and None"):
            example("torchtitan_llama3").swap_attention(titan)
