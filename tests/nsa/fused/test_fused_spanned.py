"""The kernels of the compressed and the sliding branch say what the reference says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import nsa_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_attention.ops.attend import compressed_attention, sliding_attention
from nsa_attention.ops.backends import TiledBackend
from nsa_attention.ops.fused import descriptors, launch, spanned, tuning
from nsa_attention.ops.fused.descriptors import make_descriptor
from nsa_attention.ops.fused.launch import CannotLaunchError, Tile
from nsa_attention.ops.fused.spanned import Spans, spanned_attention
from nsa_attention.ops.kernels import EagerKernel

TOLERANCE = 1e-10
KERNELS = {"spanned_forward", "spanned_backward_queries", "spanned_backward_keys"}
# Groups, heads per group, tokens, l, d, w, D, E. Of the last, small tiles have steps that all of their rows see whole.
CASES = [
    (2, 3, 41, 6, 3, 9, 6, 5),
    (1, 1, 33, 8, 4, 7, 4, 4),
    (1, 16, 23, 7, 5, 1, 3, 17),
    (2, 2, 5, 8, 4, 64, 4, 4),
    (1, 2, 1, 4, 2, 2, 4, 4),
    (1, 2, 60, 2, 1, 40, 4, 4),
]
Attention = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    ours: Attention
    theirs: Attention


@pytest.mark.parametrize("window", [5, 2**31 - 1, 2**31, 2**40])
def test_a_window_of_any_size_reaches_no_further_than_its_sequence(window: int) -> None:
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    for made, ends in ((None, [5] * 5), (starts, [2, 2, 5, 5, 5])):
        spans = spanned.window_spans(5, window, made, torch.device("cpu"))
        assert spans.stop_query_S.tolist() == ends
        assert spans.first_key_T.tolist() == [0, 0, *([0] * 3 if made is None else [2] * 3)]
        q, k, v = (torch.randn(1, heads, 5, 4, dtype=torch.float64) for heads in (2, 1, 1))
        numbers = {"scale": 0.5, "starts": made}
        ours, theirs = (
            TiledBackend(EagerKernel()).attend_sliding(q, k, v, window=size, **numbers) for size in (window, 5)
        )
        torch.testing.assert_close(ours, theirs)


@pytest.fixture(autouse=True)
def counted() -> None:
    launch.launches.clear()


@pytest.fixture(params=["one tile", "small tiles", "small tiles by descriptor"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.clear()
    if request.param == "one tile":
        monkeypatch.setattr(spanned, "MAX_PARTS", 1)
    else:
        monkeypatch.setattr(tuning.TuningKey, "tiles", lambda _self, *_sizes: [Tile(rows=16, keys=16)])
        monkeypatch.setattr(spanned, "MAX_PARTS", 2)
    monkeypatch.setattr(descriptors, "supports_descriptors", lambda _tensor: "descriptor" in request.param)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def compressed(numbers: tuple[int, ...], starts: Tensor | None = None) -> Case:
    groups, per_group, tokens, length, stride, _, width, value_width = numbers
    blocks = max(0, (tokens - length) // stride + 1)
    seen = spanned.block_spans(tokens, blocks, length, stride, starts, torch.device("cpu"))
    lengths = {"block_len": length, "block_stride": stride}
    return Case(
        q=leaf(1, groups * per_group, tokens, width),
        k=leaf(1, groups, blocks, width),
        v=leaf(1, groups, blocks, value_width),
        ours=lambda q, k, v: spanned_attention(q, k, v, seen, width**-0.5),
        theirs=lambda q, k, v: of_one(reference.compressed_attention(q[0], k[0], v[0], **lengths)),
    )


def sliding(numbers: tuple[int, ...]) -> Case:
    groups, per_group, tokens, _, _, window, width, value_width = numbers
    seen = spanned.window_spans(tokens, window, None, torch.device("cpu"))
    return Case(
        q=leaf(1, groups * per_group, tokens, width),
        k=leaf(1, groups, tokens, width),
        v=leaf(1, groups, tokens, value_width),
        ours=lambda q, k, v: spanned_attention(q, k, v, seen, width**-0.5),
        theirs=lambda q, k, v: of_one(reference.sliding_attention(q[0], k[0], v[0], window=window)),
    )


def of_one(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(result.unsqueeze(0) for result in results)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("numbers", CASES, ids=str)
@pytest.mark.parametrize("branch", [compressed, sliding], ids=lambda branch: branch.__name__)
def test_output_and_gradients_are_the_reference_s(branch: Callable[..., Case], numbers: tuple[int, ...]) -> None:
    case = branch(numbers)
    inputs = (case.q, case.k, case.v)
    ours, theirs = case.ours(*inputs), case.theirs(*inputs)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(ours[1], theirs[1].detach(), rtol=0, atol=TOLERANCE)
    upstream = torch.randn_like(theirs[0])
    for our, their in zip(
        torch.autograd.grad(ours[0], inputs, upstream),
        torch.autograd.grad(theirs[0], inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(our, their, rtol=0, atol=TOLERANCE)
    assert set(launch.launches) == (KERNELS if case.k.shape[2] else KERNELS - {"spanned_backward_keys"})


def test_a_query_before_the_first_complete_block_gets_zero_and_minus_infinity() -> None:
    case = compressed((1, 2, 20, 8, 4, 0, 4, 4))
    output, lse = case.ours(case.q, case.k, case.v)
    (grad,) = torch.autograd.grad(output.sum(), case.q)
    assert not output[:, :, :7].any()
    assert bool((lse[:, :, :7] == -torch.inf).all())
    assert bool(lse[:, :, 7:].isfinite().all())
    assert not grad[:, :, :7].any()


def test_tensors_may_be_views_with_any_strides() -> None:
    """As the projections leave them: heads inside tokens, groups cut out of a wider matrix."""
    wide = torch.randn(2, 30, 6 * 8, dtype=torch.float64)
    q = wide[..., :32].unflatten(-1, (4, 8)).transpose(1, 2)
    k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in wide[..., 32:].chunk(2, -1))
    q = q[..., ::2]
    seen = spanned.window_spans(30, 5, None, q.device)
    ours = spanned_attention(q, k, v, seen, 0.5)
    theirs = sliding_attention(q, k, v, window=5, scale=0.5, kernel=EagerKernel())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_packed_sequences_do_not_see_each_other() -> None:
    """A short sequence, an empty one and one shorter than a compressed block, each equal to itself alone."""
    lengths, block_len, stride, window = [17, 0, 3, 20], 6, 4, 5
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    blocks = [max(0, (length - block_len) // stride + 1) for length in lengths]
    q, k, v = leaf(1, 4, 40, 4), leaf(1, 2, 40, 4), leaf(1, 2, 40, 4)
    k_blocks, v_blocks = leaf(1, 2, sum(blocks), 4), leaf(1, 2, sum(blocks), 4)
    for seen, keys, values, per_sequence, alone in (
        (
            spanned.window_spans(40, window, starts, q.device),
            k,
            v,
            lengths,
            lambda *t: sliding_alone(*t, window),
        ),
        (
            spanned.block_spans(40, sum(blocks), block_len, stride, starts, q.device),
            k_blocks,
            v_blocks,
            blocks,
            lambda *t: compressed_alone(*t, block_len, stride),
        ),
    ):
        inputs = (q, keys, values)
        ours, _ = spanned_attention(*inputs, seen, 0.5)
        parts = zip(q.split(lengths, 2), keys.split(per_sequence, 2), values.split(per_sequence, 2), strict=True)
        theirs = torch.cat([alone(*part) for part in parts if part[0].shape[2]], 2)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
        upstream = torch.randn_like(theirs)
        torch.testing.assert_close(
            torch.autograd.grad(ours, inputs, upstream),
            torch.autograd.grad(theirs, inputs, upstream),
            rtol=0,
            atol=TOLERANCE,
        )


def sliding_alone(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return sliding_attention(q, k, v, window=window, scale=0.5, kernel=EagerKernel())[0]


def compressed_alone(q: Tensor, k: Tensor, v: Tensor, block_len: int, stride: int) -> Tensor:
    return compressed_attention(q, k, v, block_len=block_len, block_stride=stride, scale=0.5, kernel=EagerKernel())[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_error_is_at_most_twice_that_of_plain_torch(dtype: torch.dtype) -> None:
    rounded = [torch.randn(1, heads, 40, 16).to(dtype) for heads in (4, 2, 2)]
    upstream = torch.randn(1, 4, 40, 16).to(dtype)
    seen = spanned.window_spans(40, 12, None, torch.device("cpu"))

    def results(attention: Attention, kind: torch.dtype) -> list[Tensor]:
        inputs = [tensor.to(kind).requires_grad_() for tensor in rounded]
        output = attention(*inputs)[0]
        return [output.detach(), *torch.autograd.grad(output, inputs, upstream.to(kind))]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return sliding_attention(q, k, v, window=12, scale=0.25, kernel=EagerKernel())

    ours, theirs = results(lambda q, k, v: spanned_attention(q, k, v, seen, 0.25), dtype), results(plain, dtype)
    for our, their, true in zip(ours, theirs, results(plain, torch.float64), strict=True):
        assert float((our - true).abs().max()) <= 2 * float((their - true).abs().max())


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_huge_logits_stay_finite(dtype: torch.dtype) -> None:
    q, k, v = ((60 * torch.randn(1, heads, 40, 16)).to(dtype).requires_grad_() for heads in (4, 2, 2))
    output, lse = spanned_attention(q, k, v, spanned.window_spans(40, 12, None, q.device), 1.0)
    for tensor in (output, lse, *torch.autograd.grad(output.float().sum(), (q, k, v))):
        assert bool(tensor.isfinite().all())


def test_the_gradients_are_those_of_the_output() -> None:
    case = compressed((1, 2, 9, 3, 2, 0, 3, 2))
    assert torch.autograd.gradcheck(lambda *inputs: case.ours(*inputs)[0], (case.q, case.k, case.v), fast_mode=True)


def test_the_same_inputs_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.TuningKey, "tiles", lambda _self, *_sizes: [Tile(rows=16, keys=16)])
    tuning.clear()
    q, k, v = (
        leaf(1, 3, 40, 4, dtype=torch.float32),
        leaf(1, 1, 40, 4, dtype=torch.float32),
        leaf(1, 1, 40, 4, dtype=torch.float32),
    )
    seen = spanned.window_spans(40, 30, None, q.device)

    def once() -> list[Tensor]:
        output, lse = spanned_attention(q, k, v, seen, 0.5)
        return [output, lse, *torch.autograd.grad(output.sum(), (q, k, v))]

    for first, second in zip(once(), once(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(("heads", "width", "described"), [(2, 4, 4 + 2), (3, 4, 4), (2, 3, 0)], ids=str)
def test_tiles_by_descriptor_are_the_same_bits(
    heads: int, width: int, described: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of two kernels; queries and gradients of one, unless heads are padded; none with odd rows."""
    q, k, v = leaf(1, 2 * heads, 20, width), leaf(1, 2, 20, width), leaf(1, 2, 20, width)
    seen, upstream = spanned.window_spans(20, 9, None, q.device), torch.randn_like(q)
    made = []

    def once() -> list[Tensor]:
        output, lse = spanned_attention(q, k, v, seen, 0.5)
        return [output, lse, *torch.autograd.grad(output, (q, k, v), upstream)]

    def noted(tensor: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
        made.append(block)
        return make_descriptor(tensor, block)

    by_pointers = once()
    monkeypatch.setattr(descriptors, "supports_descriptors", lambda _tensor: True)
    for module in (spanned, descriptors):
        monkeypatch.setattr(module, "make_descriptor", noted)
    for first, second in zip(by_pointers, once(), strict=True):
        assert torch.equal(first, second)
    assert len(made) == described


def test_torch_accepts_the_operators() -> None:
    q, k, v = leaf(1, 2, 7, 4), leaf(1, 1, 7, 4), leaf(1, 1, 7, 4)
    seen = spanned.window_spans(7, 3, None, q.device).tensors()
    torch.library.opcheck(spanned._spanned_attention_op, (q, k, v, *seen, 0.5, "any"))
    output, lse = spanned._spanned_attention_op(q, k, v, *seen, 0.5, "any")
    saved = [tensor.detach() for tensor in (torch.randn_like(output), q, k, v, *seen, output, lse)]
    torch.library.opcheck(spanned._spanned_attention_backward_op, (*saved, 0.5, "any"))


def test_bfloat16_is_refused_under_the_interpreter() -> None:
    q = torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16)
    with pytest.raises(CannotLaunchError, match="bfloat16"):
        spanned_attention(q, q, q, spanned.window_spans(4, 2, None, q.device), 1.0)


@pytest.mark.parametrize(
    ("heads", "groups", "width", "text"),
    [
        (65, 1, 4, "65 query heads for 1 groups: each takes the same number, 1 to 64"),
        (3, 2, 4, "3 query heads for 2 groups"),
        (1, 1, 257, "keys of width 257, values of width 257: the widest is 256"),
    ],
)
def test_what_no_kernel_takes_is_refused(heads: int, groups: int, width: int, text: str) -> None:
    q, k = torch.zeros(1, heads, 4, width), torch.zeros(1, groups, 4, width)
    with pytest.raises(CannotLaunchError, match=text):
        spanned_attention(q, k, k, spanned.window_spans(4, 2, None, q.device), 1.0)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_may_be_zero_or_turn_the_order_of_scores_around(scale: float) -> None:
    q, k, v = leaf(1, 2, 40, 4), leaf(1, 1, 40, 4), leaf(1, 1, 40, 4)
    ours = spanned_attention(q, k, v, spanned.window_spans(40, 35, None, q.device), scale)
    theirs = sliding_attention(q, k, v, window=35, scale=scale, kernel=EagerKernel())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_tensors_of_several_dtypes_are_refused() -> None:
    q = torch.zeros(1, 1, 4, 4)
    with pytest.raises(CannotLaunchError, match=r"torch\.float32, torch\.float64"):
        spanned_attention(q, q.double(), q, spanned.window_spans(4, 2, None, q.device), 1.0)


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(sum),
    block_len=st.integers(1, 6),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_both_directions_of_the_spans_tell_the_same_pairs(
    lengths: list[int], block_len: int, data: st.DataObject
) -> None:
    """And these pairs are the ones the definition names, for any sequences."""
    stride, window = data.draw(st.integers(1, block_len)), data.draw(st.integers(1, 14))
    starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    cumulative, device = torch.tensor(starts, dtype=torch.int32), torch.device("cpu")
    windows, blocks = [], []
    key = 0
    for begin, length in zip(starts, lengths, strict=False):
        windows += [(t, s) for t in range(begin, begin + length) for s in range(max(begin, t - window + 1), t + 1)]
        for i in range(max(0, (length - block_len) // stride + 1)):
            blocks += [(t, key) for t in range(begin + i * stride + block_len - 1, begin + length)]
            key += 1
    total = starts[-1]
    assert pairs(spanned.window_spans(total, window, cumulative, device)) == (sorted(windows), sorted(windows))
    found = spanned.block_spans(total, key, block_len, stride, cumulative, device)
    assert pairs(found) == (sorted(blocks), sorted(blocks))


def pairs(seen: Spans) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(query, key) as the forward pass walks them, and as the gradients of the keys do."""
    first_key, stop_key, first_query, stop_query = (tensor.tolist() for tensor in seen.tensors())
    forward = [(t, s) for t, span in enumerate(zip(first_key, stop_key, strict=True)) for s in range(*span)]
    backward = [(t, s) for s, span in enumerate(zip(first_query, stop_query, strict=True)) for t in range(*span)]
    return forward, sorted(backward)
