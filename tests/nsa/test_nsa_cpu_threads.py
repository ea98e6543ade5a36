"""Pieces of work side by side on the cores of a CPU give what one core gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from nsa_attention.attention import NSAttention
from nsa_attention.ops.attend import compressed_attention, selected_attention, sliding_attention
from nsa_attention.ops.cpu_threads import run_in_threads, split_work
from nsa_attention.ops.kernels import KERNELS
from nsa_attention.ops.selection import Selection, select_blocks

CPU = torch.device("cpu")


@pytest.fixture
def three_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_cores")
class TestPieces:
    def test_come_back_in_their_order_whichever_ends_first(self) -> None:
        """The first piece cannot end before the last has."""
        last_is_done = threading.Event()
        pieces = [lambda: last_is_done.wait(30) and "first", lambda: "second", lambda: last_is_done.set() or "third"]
        assert run_in_threads(pieces) == ["first", "second", "third"]

    def test_have_one_core_each_record_no_graph_and_leave_no_thread(self) -> None:
        leaf = torch.ones(1, requires_grad=True)
        threads = threading.active_count()
        results = run_in_threads([lambda: (torch.get_num_threads(), (leaf * 2).requires_grad)] * 5)
        assert results == [(1, False)] * 5
        assert torch.get_num_threads() == 3
        assert threading.active_count() == threads

    def test_that_fail_are_told_and_the_cores_are_given_back(self) -> None:
        def broken() -> None:
            raise ValueError("no")

        for pieces in ([broken, int], [int, broken]):
            with pytest.raises(ValueError, match="no"):
                run_in_threads(pieces)
            assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize(
    ("rows", "heads", "pieces"), [(1, 3, 3), (2, 2, 4), (3, 4, 3), (7, 1, 3), (1, 2, 1), (2, 1, 1), (0, 2, 1)]
)
def test_shares_cover_every_head_of_every_row_once(rows: int, heads: int, pieces: int) -> None:
    covered = torch.zeros(rows, heads)
    cut = split_work(CPU, rows, heads)
    for share in cut:
        covered[share] += 1
    assert len(cut) == pieces
    assert torch.equal(covered, torch.ones(rows, heads))


def test_one_core_and_other_devices_have_one_share() -> None:
    assert split_work(CPU, 8, 2) == [(slice(0, 8), slice(0, 2))]
    assert split_work(torch.device("meta"), 8, 2) == [(slice(0, 8), slice(0, 2))]


@pytest.mark.parametrize(("batch", "heads", "groups"), [(1, 3, 1), (1, 4, 2), (5, 2, 2)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_every_branch_computes_on_three_cores_what_it_computes_on_one(
    kernel: object, batch: int, heads: int, groups: int, request: pytest.FixtureRequest
) -> None:
    def leaf(number: int, length: int) -> Tensor:
        return torch.randn(batch, number, length, 4, dtype=torch.float64, requires_grad=True)

    q, k, v, k_blocks, v_blocks = leaf(heads, 37), leaf(groups, 37), leaf(groups, 37), leaf(groups, 8), leaf(groups, 8)
    selection = Selection(block_len=8, block_stride=4, select_len=5, select_count=4, scale=0.5)

    def everything() -> list[Tensor]:
        indices = select_blocks(q, k_blocks, selection)
        outputs = [
            compressed_attention(q, k_blocks, v_blocks, block_len=8, block_stride=4, scale=0.5, kernel=kernel),
            selected_attention(q, k, v, indices, select_len=5, scale=0.5, kernel=kernel),
            sliding_attention(q, k, v, window=6, scale=0.5, kernel=kernel),
        ]
        total = sum(output.square().sum() for output, _ in outputs)
        return [indices, *(lse for _, lse in outputs), *torch.autograd.grad(total, (q, k, v, k_blocks, v_blocks))]

    alone = everything()
    request.getfixturevalue("three_cores")
    together, again = everything(), everything()
    for one, many, repeated in zip(alone, together, again, strict=True):
        torch.testing.assert_close(many, one, rtol=0, atol=1e-12)
        assert torch.equal(many, repeated)


@pytest.mark.usefixtures("three_cores")
def test_pieces_may_change_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        result = torch.zeros(2)

        def write(row: int) -> None:
            result[row] = row + 1

        run_in_threads([partial(write, row) for row in range(2)])
    assert result.tolist() == [1, 2]


@pytest.mark.usefixtures("three_cores")
def test_a_layer_computes_in_inference_mode_what_it_computes_without_gradients() -> None:
    layer, x = NSAttention(32, 4, 2, block_size=16, block_count=4, window=32), torch.randn(1, 64, 32)
    with torch.no_grad():
        expected = layer(x)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
