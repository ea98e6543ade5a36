"""Documents packed into rows: the language model gives each of them what it gives it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from wrapped_gradients import built, whole_gradients

from nsa_attention.config import ALL_BRANCHES, Attention, Branch, Compression, Implementation, NSAConfig
from nsa_attention.data import IGNORED
from nsa_attention.model import Recompute, TinyLM
from nsa_attention.ops.packed import compressed_starts, packed_layout
from nsa_attention.ops.selection import RANKERS
from nsa_attention.parallelize import average_gradients, checkpoint_layers, parallelize
from nsa_attention.samples import Observer
from nsa_attention.settings import read_settings
from nsa_attention.train import summed_loss
from nsa_attention.values import Wrapper
from nsa_attention.world import join_ranks

SUBSETS = [pair for size in (1, 2, 3) for pair in combinations(ALL_BRANCHES, size)]
# Two rows of 40: one token, shorter than a block, as long as one, longer, a whole row.
LENGTHS = (1, 5, 6, 28, 40)


def outputs_and_gradients(model: TinyLM, logits: Tensor, weights: Tensor) -> list[Tensor]:
    model.zero_grad()
    (logits * weights).sum().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_each_is_as_alone(model: TinyLM, lengths: Sequence[int], rows: int) -> None:
    """In float64: logits and the gradient of every parameter."""
    model.double()
    tokens = torch.randint(model.config.vocab, (rows, sum(lengths) // rows))
    weights = torch.randn(1, sum(lengths), model.config.vocab, dtype=torch.float64)
    ours = outputs_and_gradients(model, model(tokens, lengths).view(1, sum(lengths), -1), weights)
    alone = torch.cat([model(part) for part in tokens.reshape(1, -1).split(list(lengths), 1)], 1)
    for our, their in zip(ours, outputs_and_gradients(model, alone, weights), strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-10)


@pytest.mark.parametrize("branches", SUBSETS, ids=lambda subset: "+".join(subset))
@pytest.mark.parametrize("implementation", [Implementation.AUTO, Implementation.EAGER], ids=str)
@pytest.mark.parametrize("width", [5, 6], ids="values of {}".format)  # of keys it is 6: only then the fused path runs
def test_a_packed_document_is_the_document_alone(
    tiny: NSAConfig, branches: tuple[Branch, ...], implementation: Implementation, width: int
) -> None:
    config = replace(tiny, branches=branches, d_v=width)
    assert_each_is_as_alone(TinyLM.from_config(config, implementation), LENGTHS, rows=2)


@pytest.mark.parametrize("implementation", [Implementation.DENSE, Implementation.PER_TOKEN], ids=str)
def test_so_it_is_with_the_implementations_that_nobody_gets_unasked(
    tiny: NSAConfig, implementation: Implementation
) -> None:
    assert_each_is_as_alone(TinyLM.from_config(tiny, implementation), LENGTHS, rows=2)


def test_so_it_is_with_the_fused_kernels(tiny: NSAConfig) -> None:
    config = replace(tiny, layers=1, vocab=5)
    assert_each_is_as_alone(TinyLM.from_config(config, Implementation.TRITON), (3, 17), rows=1)


def test_what_was_selected_is_counted_in_each_document(tiny: NSAConfig) -> None:
    """Alone, each document has the same blocks forced; counted along the row, hardly any would be."""
    model = TinyLM.from_config(replace(tiny, layers=1))
    observer = Observer(model)
    tokens = torch.randint(tiny.vocab, (1, 8)).repeat(1, 5)
    observer.watch()
    model(tokens[:, :8])
    alone = observer.selections()
    model(tokens, (8,) * 5)
    assert observer.selections() == alone
    assert alone[0].forced_share == 1.0


def test_so_it_is_with_blocks_of_means_and_in_the_dense_control(tiny: NSAConfig) -> None:
    assert_each_is_as_alone(TinyLM.from_config(replace(tiny, compression=Compression.MEAN)), LENGTHS, rows=2)
    assert_each_is_as_alone(TinyLM.from_config(replace(tiny, attention=Attention.VANILLA)), LENGTHS, rows=2)


@pytest.mark.parametrize("mode", list(Recompute))
@pytest.mark.parametrize("attention", [Attention.NSA, Attention.VANILLA])
def test_so_it_is_when_layers_run_again(tiny: NSAConfig, mode: Recompute, attention: Attention) -> None:
    model = TinyLM.from_config(replace(tiny, attention=attention))
    checkpoint_layers(model, {0, 1}, mode)
    assert_each_is_as_alone(model, LENGTHS, rows=2)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=7))
def test_any_lengths_do(lengths: list[int]) -> None:
    torch.manual_seed(sum(lengths))
    config = NSAConfig(
        vocab=11, dim=12, layers=1, heads=2, groups=1, d_k=4, d_v=4, block_len=6, block_stride=3, select_len=5,
        select_count=3, window=7,
    )  # fmt: skip
    assert_each_is_as_alone(TinyLM.from_config(config), lengths, rows=1)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), block_len=st.integers(1, 9), data=st.data())
def test_the_blocks_of_a_row_are_the_complete_ones_of_its_documents(
    lengths: list[int], block_len: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, block_len))
    row = packed_layout(lengths, block_len, stride, torch.device("cpu"))
    expected = [
        list(range(begin + first, begin + first + block_len))
        for begin, length in zip(row.starts.tolist(), lengths, strict=False)
        for first in range(0, length - block_len + 1, stride)
    ]
    assert row.blocks_Sl.tolist() == expected
    assert len(expected) == int(compressed_starts(row.starts, block_len, stride)[-1])
    assert row.positions_T.tolist() == [place for length in lengths for place in range(length)]


@pytest.mark.parametrize("mode", list(Recompute))
def test_a_layer_of_documents_that_runs_again_reads_the_blocks_of_its_first_pass(
    tiny: NSAConfig, mode: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tensor] = []
    by_tiles = RANKERS["tiles"]
    monkeypatch.setitem(RANKERS, "tiles", lambda *given: made.append(by_tiles(*given)) or made[-1])
    model = TinyLM.from_config(replace(tiny, layers=1))
    read: list[Tensor] = []
    model.blocks[0].attn.sel.chooser.register_forward_hook(lambda _, __, indices: read.append(indices))
    checkpoint_layers(model, {0}, mode)
    model(torch.randint(tiny.vocab, (2, 40)), LENGTHS).logsumexp(-1).mean().backward()
    assert len(made) == 1
    assert len(read) == 2
    assert all(torch.equal(one, made[0]) for one in read)


def test_the_graph_has_as_many_nodes_for_any_number_of_documents(tiny: NSAConfig) -> None:
    """And no step of it is taken once a document: many short ones would look like a hang."""
    model = TinyLM.from_config(replace(tiny, d_v=6))
    tokens = torch.randint(tiny.vocab, (1, 120))
    assert len({nodes(model(tokens, lengths)) for lengths in ((120,), (60, 60), (1,) * 120, (7, 90, 23))}) == 1


def nodes(output: Tensor) -> int:
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return len(seen)


def test_a_later_document_changes_nothing_and_an_earlier_one_neither(tiny: NSAConfig) -> None:
    model = TinyLM.from_config(tiny).double()
    tokens = torch.randint(tiny.vocab, (1, 40))
    changed = tokens.clone()
    changed[:, :7], changed[:, 30:] = 1, 2
    lengths = (7, 23, 10)
    before, after = model(tokens, lengths), model(changed, lengths)
    assert torch.equal(before[:, 7:30], after[:, 7:30])
    assert not torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(model(tokens)[:, 7:30], before[:, 7:30])


@pytest.mark.parametrize("lengths", [(39,), (20, 21), (0, 40)])
def test_lengths_that_do_not_fill_the_rows_are_an_error(tiny: NSAConfig, lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="lengths: expected documents of 40 tokens together"):
        TinyLM.from_config(tiny)(torch.zeros(1, 40, dtype=torch.long), lengths)


def test_the_stock_control_refuses_documents(tiny: NSAConfig) -> None:
    model = TinyLM.from_config(replace(tiny, attention=Attention.STOCK))
    with pytest.raises(ValueError, match="takes one sequence a row"):
        model(torch.zeros(1, 40, dtype=torch.long), (40,))


WAYS = {
    "ddp": ("--wrapper", "ddp"),
    "ddp gc": ("--wrapper", "ddp", "--gc", "0:1"),
    "ddp reentrant": ("--wrapper", "ddp", "--static-graph", "--gc", "all", "--gc-mode", "reentrant"),
    "fsdp": ("--wrapper", "fsdp"),
    "fsdp1": ("--wrapper", "fsdp1", "--gc", "all"),
    "manual": ("--wrapper", "manual"),
}


@pytest.mark.ranks(2, backend=None)
def test_two_ranks_with_documents_of_their_own_compute_the_gradients_of_one_process() -> None:
    tokens = torch.randint(256, (2, 97))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, [29, 30, 95]] = IGNORED  # the last tokens of three documents
    counted = int((targets != IGNORED).sum())
    lengths = ((30, 1, 65), (96,))  # a row for each rank: the ranks count different numbers of targets
    with join_ranks("cpu", "gloo", needs_group=True) as world:
        mine = slice(world.rank, world.rank + 1)
        for options in WAYS.values():
            model_settings = read_settings(("--layers", "2", "--dtype", "float64", *options), {})
            whole, bare = (built(model_settings, torch.float64) for _ in range(2))
            (summed_loss(whole(inputs, sum(lengths, ())), targets) / counted).backward()
            expected = {key: parameter.grad for key, parameter in whole.named_parameters()}
            model = parallelize(bare, model_settings, world, None)
            loss = summed_loss(model(inputs[mine], lengths[world.rank]), targets[mine])
            (loss * world.size / counted).backward()
            if model_settings.wrapper is Wrapper.MANUAL:
                average_gradients(bare, world)
            for key, gradient in whole_gradients(model):
                torch.testing.assert_close(gradient, expected[key], rtol=0, atol=1e-10)
