"""The model as a whole: no look into the future, a graph of constant size, recomputation that changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import combinations

import nsa_reference as reference
import pytest
import torch
from torch import Tensor, nn

from nsa_attention.attention import NSAttention
from nsa_attention.branches import BlockSelector
from nsa_attention.config import ALL_BRANCHES, CI, SHAPES, Attention, Branch, Compression, Implementation, NSAConfig
from nsa_attention.model import Block, Recompute, TinyLM, count_parameters
from nsa_attention.ops.rotary import rotary_cos_sin, rotary_frequencies
from nsa_attention.ops.selection import RANKERS, SelectionMemo
from nsa_attention.parallelize import checkpoint_layers
from nsa_attention.projections import TokenContext

SUBSETS = [pair for size in (1, 2, 3) for pair in combinations(ALL_BRANCHES, size)]


def tokens(config: NSAConfig, length: int, batch: int = 2) -> Tensor:
    return torch.randint(config.vocab, (batch, length))


def gradients(model: TinyLM, inputs: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    model(inputs).logsumexp(-1).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def graph_nodes(output: Tensor) -> int:
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return len(seen)


def numbers_of(config: NSAConfig) -> reference.LayerSizes:
    return reference.LayerSizes(**{field.name: getattr(config, field.name) for field in fields(reference.LayerSizes)})


@pytest.mark.parametrize("branches", SUBSETS, ids=lambda subset: "+".join(subset))
@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("length", [3, 5, 6, 37])  # below, at and above l = 6 and l' = 5
def test_a_block_is_the_block_of_the_reference(
    tiny: NSAConfig, branches: tuple[Branch, ...], compression: Compression, length: int
) -> None:
    """Projections, rotary positions, compression, gates, norms and MLP: output and every gradient."""
    config = replace(tiny, branches=branches, compression=compression)
    block = Block(config, Implementation.AUTO).double()
    x = torch.randn(2, length, config.dim, dtype=torch.float64, requires_grad=True)
    angles = reference.angles(range(length), config.d_k)
    ours = block(x, torch.stack((angles.cos(), angles.sin())))
    theirs = torch.stack([reference.block(row, dict(block.named_parameters()), numbers_of(config)) for row in x])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    upstream, inputs = torch.randn_like(ours), (x, *block.parameters())
    # A sequence shorter than a block leaves the compressing weights out of the reference's graph: their gradient is 0.
    expected = torch.autograd.grad(theirs, inputs, upstream, allow_unused=True, materialize_grads=True)
    for our, their in zip(torch.autograd.grad(ours, inputs, upstream), expected, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-10)


def test_the_reproduction_of_the_third_report_trains_with_four_and_five_layers() -> None:
    for layers in (4, 5):
        model = TinyLM(256, 128, layers, 8, 2, 16, 16, 16, 8, 32, 8, 64)
        model(torch.randint(0, 256, (1, 128))).mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.config == replace(SHAPES["repro"], name="custom", batch=2)


def test_parameters_are_named_as_in_the_reports() -> None:
    names = {name for name, _ in TinyLM.from_config(CI).named_parameters()}
    assert {"blocks.3.attn.gate_mlp.weight", "blocks.3.attn.gate_mlp.bias"} <= names
    assert {f"blocks.0.attn.{branch}.k_proj.weight" for branch in ("cmp", "sel", "win")} <= names


@pytest.mark.parametrize("branches", SUBSETS, ids=lambda subset: "+".join(subset))
@pytest.mark.parametrize("compression", list(Compression))
class TestEverySetOfBranches:
    def test_every_parameter_gets_a_gradient_at_every_length(
        self, tiny: NSAConfig, branches: tuple[Branch, ...], compression: Compression
    ) -> None:
        model = TinyLM.from_config(replace(tiny, branches=branches, compression=compression))
        for length in (1, 3, 5, 6, 37):  # below, at and above l = 6 and l' = 5
            found = gradients(model, tokens(tiny, length))
            assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in found)

    def test_no_output_and_no_choice_depends_on_later_tokens(
        self, tiny: NSAConfig, branches: tuple[Branch, ...], compression: Compression
    ) -> None:
        model = TinyLM.from_config(replace(tiny, branches=branches, compression=compression)).double()
        chosen: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, BlockSelector):
                module.register_forward_hook(lambda _, __, indices: chosen.append(indices))
        inputs = tokens(tiny, 40)
        before = model(inputs)
        first_choices = chosen[:]
        for cut in (1, 9, 20, 39):
            changed = inputs.clone()
            changed[:, cut:] = (changed[:, cut:] + 1) % tiny.vocab
            chosen.clear()
            after = model(changed)
            torch.testing.assert_close(after[:, :cut], before[:, :cut], rtol=0, atol=1e-12)
            assert not torch.equal(after[:, cut:], before[:, cut:])
            for first, second in zip(first_choices, chosen, strict=True):
                assert torch.equal(first[:, :, :cut], second[:, :, :cut])


def test_a_query_sees_the_tokens_that_its_branch_promises(tiny: NSAConfig) -> None:
    """The gradient of one output reaches exactly the window: the sliding layer alone, without residual path."""
    layer = NSAttention.from_config(replace(tiny, branches=(Branch.WIN,)))
    x = torch.randn(1, 40, tiny.dim, requires_grad=True)
    layer(x)[0, 30].sum().backward()
    assert x.grad is not None
    reached = x.grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert reached == list(range(30 - tiny.window + 1, 31))


@pytest.mark.parametrize("attention", list(Attention))
def test_the_graph_has_as_many_nodes_at_any_length(attention: Attention) -> None:
    model = TinyLM.from_config(replace(CI, attention=attention, layers=2))
    sizes = {graph_nodes(model(tokens(CI, length, batch=1))) for length in (64, 512, 4096)}
    assert len(sizes) == 1


@pytest.mark.parametrize("mode", list(Recompute))
@pytest.mark.parametrize("attention", list(Attention))
@pytest.mark.parametrize("layers", [{0}, {1}, {0, 1}], ids=str)
def test_checkpointing_changes_no_gradient(mode: Recompute, attention: Attention, layers: Iterable[int]) -> None:
    model = TinyLM.from_config(replace(CI, attention=attention, layers=2))
    inputs = tokens(CI, 96)
    plain = gradients(model, inputs)
    checkpoint_layers(model, layers, mode)
    assert [block.recompute is mode for block in model.blocks] == [number in layers for number in range(2)]
    for kept, recomputed in zip(plain, gradients(model, inputs), strict=True):
        assert kept is not None
        assert recomputed is not None
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize("mode", list(Recompute))
def test_recomputation_reads_the_blocks_of_the_first_pass(mode: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    """A selection that comes out differently each time is made once per step, so the second pass cannot differ."""
    made = []

    def at_random(q_BHTD: Tensor, k_BGSD: Tensor, *_: object) -> Tensor:
        made.append(torch.randint(2, (q_BHTD.shape[0], k_BGSD.shape[1], q_BHTD.shape[2], 3), dtype=torch.int32))
        return made[-1]

    monkeypatch.setitem(RANKERS, "tiles", at_random)
    model = TinyLM.from_config(replace(CI, layers=1))
    read = []
    model.blocks[0].attn.sel.chooser.register_forward_hook(lambda _, __, indices: read.append(indices))
    checkpoint_layers(model, {0}, mode)
    for _ in range(2):
        gradients(model, tokens(CI, 64))
    assert len(made) == 2
    assert not torch.equal(*made)
    for kept, (first, second) in zip(made, [read[:2], read[2:]], strict=True):
        assert torch.equal(kept, first)
        assert torch.equal(kept, second)
    assert not SelectionMemo._memos  # nothing is kept for longer than a second pass may come


def test_a_memo_decides_what_is_read(tiny: NSAConfig) -> None:
    layer = NSAttention.from_config(replace(tiny, branches=(Branch.SEL,)))
    x, rotation = torch.randn(1, 40, tiny.dim), rotary_cos_sin(rotary_frequencies(tiny.d_k), 40)
    memo = SelectionMemo()
    context = TokenContext(rotation, memo.number)
    first = layer(x, context=context)
    assert memo.indices is not None
    assert torch.equal(first, layer(x, context=context))
    memo.indices = torch.full_like(memo.indices, -1)
    assert torch.equal(layer(x, context=context), torch.zeros_like(first))


def test_eager_and_auto_agree() -> None:
    model = TinyLM.from_config(CI, Implementation.AUTO).double()
    plain = TinyLM.from_config(CI, Implementation.EAGER).double()
    plain.load_state_dict(model.state_dict())
    inputs = tokens(CI, 100)
    torch.testing.assert_close(model(inputs), plain(inputs), rtol=0, atol=1e-12)


def test_the_controls_have_the_same_size_within_a_sixth() -> None:
    sizes = {
        attention: count_parameters(TinyLM.from_config(replace(CI, attention=attention))) for attention in Attention
    }
    assert max(sizes.values()) < min(sizes.values()) * 7 / 6


def test_the_production_shape_is_the_model_of_125_million() -> None:
    with torch.device("meta"):
        model = TinyLM.from_config(SHAPES["production"])
    assert 120e6 < count_parameters(model) < 135e6


def test_the_stock_control_runs_torchs_own_layer_and_does_not_see_the_future() -> None:
    model = TinyLM.from_config(replace(CI, attention=Attention.STOCK, layers=1)).double()
    assert any(type(module) is nn.TransformerEncoderLayer for module in model.modules())
    inputs = tokens(CI, 20)
    changed = inputs.clone()
    changed[:, 10:] += 1
    changed %= CI.vocab
    torch.testing.assert_close(model(inputs)[:, :10], model(changed)[:, :10], rtol=0, atol=1e-12)


@pytest.mark.parametrize("implementation", ["auto", "eager", "dense", "per_token", "triton"])
def test_no_token_gives_no_logits_and_gradients_of_zeros(tiny: NSAConfig, implementation: str) -> None:
    model = TinyLM.from_config(tiny, Implementation(implementation))
    logits = model(torch.zeros(2, 0, dtype=torch.long))
    assert logits.shape == (2, 0, tiny.vocab)
    logits.sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())
