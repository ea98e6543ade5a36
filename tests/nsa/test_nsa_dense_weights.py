"""A layer that starts from the weights of dense attention computes the same while it reads all earlier tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nsa_attention import NSAttention, load_dense_weights
from nsa_attention.ops.rotary import rotary_cos_sin, rotary_frequencies, rotate
from nsa_attention.projections import split_heads

DIM, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 24, 4, 2, 6, 4
LENGTHS = {"block_size": 8, "block_count": 4, "compress_size": 6, "compress_stride": 3, "window": 7}  # reads 32 tokens


def weights() -> list[Tensor]:
    shapes = [(HEADS * WIDTH, DIM), (KV_HEADS * WIDTH, DIM), (KV_HEADS * VALUE_WIDTH, DIM), (DIM, HEADS * VALUE_WIDTH)]
    return [torch.randn(shape, dtype=torch.float64) / DIM**0.5 for shape in shapes]


def layer(compression: str = "mean_mlp") -> NSAttention:
    sizes = {"head_dim": WIDTH, "v_head_dim": VALUE_WIDTH, "compression": compression, "dtype": torch.float64}
    return NSAttention(DIM, HEADS, KV_HEADS, **sizes, **LENGTHS)


def dense_attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    cos_sin = rotary_cos_sin(rotary_frequencies(WIDTH).double(), x.shape[1])
    queries, keys, values = (split_heads(x @ w.T, heads) for w, heads in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS)))
    attended = functional.scaled_dot_product_attention(
        rotate(queries, cos_sin), rotate(keys, cos_sin), values, is_causal=True, enable_gqa=True
    )
    return attended.transpose(1, 2).flatten(2) @ out.T


@pytest.mark.parametrize("compression", ["mean_mlp", "mean", "mlp"])
def test_it_equals_dense_attention_while_it_reads_all_earlier_tokens(compression: str) -> None:
    nsa, given, x = layer(compression), weights(), torch.randn(2, 40, DIM, dtype=torch.float64)
    load_dense_weights(nsa, *given, open_gate=60.0)
    difference = (nsa(x) - dense_attention(x, *given)).abs().amax((0, 2))
    assert difference[:32].max() < 1e-6
    assert difference[32:].max() > 1e-3  # from here on a query reads 4 of 5 blocks


def test_with_the_default_gate_it_is_close_and_every_parameter_can_learn() -> None:
    nsa, given, x = layer(), weights(), torch.randn(2, 32, DIM, dtype=torch.float64)
    before = (nsa(x) - dense_attention(x, *given)).norm()
    load_dense_weights(nsa, *given)
    output = nsa(x)
    assert (output - dense_attention(x, *given)).norm() < 0.1 * before
    output.square().sum().backward()
    still = {name for name, one in nsa.named_parameters() if one.grad is None or not one.grad.any()}
    # These act through layers that start as zero; after a first step they learn too.
    hidden = {f"cmp.{side}_blocks.{name}" for side in "kv" for name in ("position", "inner.weight", "inner.bias")}
    assert still == hidden | {"gate_mlp.hidden.weight", "gate_mlp.hidden.bias"}


def test_the_compressed_keys_start_as_means() -> None:
    nsa = layer()
    load_dense_weights(nsa, *weights())
    blocks = torch.randn(1, KV_HEADS, 3, 6, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(nsa.cmp.k_blocks.compress(blocks), blocks.mean(3))


def test_every_weight_that_does_not_fit_is_named() -> None:
    q, k, v, out = weights()
    with pytest.raises(ValueError, match=r"^load_dense_weights: ") as error:
        load_dense_weights(layer(), q.T[:3], k, out, v)
    assert str(error.value) == (
        "load_dense_weights: q: expected the shape [24, 24], got [3, 24]; "
        "v: expected the shape [8, 24], got [24, 16]; out: expected the shape [24, 16], got [8, 24]"
    )
