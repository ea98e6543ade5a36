"""What a step says of its cost: nodes and kept bytes, the same in every run, with what grows as it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa_attention.config import CI, Attention, Implementation, NSAConfig
from nsa_attention.cost import SavedTensorCounter, expected_bytes, graph_nodes
from nsa_attention.model import Recompute, TinyLM
from nsa_attention.train import loss_of

SMALL = replace(CI, layers=1)


def cost(
    config: NSAConfig, implementation: Implementation = Implementation.AUTO, recompute: Recompute | None = None
) -> tuple[int, int, int | None]:
    """Nodes, bytes kept, and bytes of those with a row and a column for each token."""
    model = TinyLM.from_config(config, implementation)
    model.blocks[0].recompute = recompute
    tokens = torch.randint(config.vocab, (1, config.seq_len))
    with SavedTensorCounter(model, config.seq_len) as kept:
        loss = loss_of(model(tokens), tokens)
    counted = graph_nodes(loss), kept.size_bytes, kept.square_bytes
    loss.backward()
    assert all(one.grad is not None for one in model.parameters())
    return counted


@pytest.mark.parametrize("attention", [Attention.NSA, Attention.VANILLA])
def test_a_healthy_graph_has_as_many_nodes_at_every_length_and_keeps_what_grows_with_it(attention: Attention) -> None:
    (few, short, none), (many, long, still_none) = (
        cost(replace(SMALL, attention=attention, seq_len=tokens)) for tokens in (192, 576)
    )
    assert few == many
    assert 2.9 < long / short < 3.1
    assert (none, still_none) == (0, 0)


def test_the_loop_over_tokens_has_nodes_for_each_of_them() -> None:
    (few, *_), (many, *_) = (cost(replace(SMALL, seq_len=tokens), Implementation.PER_TOKEN) for tokens in (96, 192))
    assert 1.9 < many / few < 2.3  # the first tokens see fewer blocks
    assert few > 20 * 96


def test_attention_with_all_its_scores_keeps_a_square_of_the_tokens() -> None:
    _, short, square = cost(replace(SMALL, seq_len=192), Implementation.DENSE)
    _, long, larger = cost(replace(SMALL, seq_len=576), Implementation.DENSE)
    assert square is not None
    assert larger is not None
    assert larger == 9 * square
    assert larger > long / 2
    assert square < short


def test_a_length_that_is_a_width_of_the_model_does_not_tell_squares() -> None:
    assert cost(replace(SMALL, seq_len=SMALL.dim))[2] is None


def test_of_a_checkpointed_layer_only_its_input_is_kept() -> None:
    config = replace(SMALL, seq_len=192)
    assert cost(config, recompute=Recompute.NON_REENTRANT)[1] < cost(config)[1] / 3


def test_what_is_expected_is_more_than_a_healthy_step_keeps_and_not_ten_times_that() -> None:
    config = replace(CI, seq_len=576, batch=1)
    model = TinyLM.from_config(config)
    parameter_bytes = sum(one.numel() * one.element_size() for one in model.parameters())
    kept = cost(config)[1]
    assert kept < expected_bytes(config, parameter_bytes, 1) - 4 * parameter_bytes < 3 * kept
