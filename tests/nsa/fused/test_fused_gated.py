"""All branches and their gates as one operator give what an operator for each gives, and write less on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from nsa_attention.config import Implementation
from nsa_attention.ops.fused import descriptors, importance, launch, lists, mix, selected, spanned, tuning
from nsa_attention.ops.fused import gated_attention as gated
from nsa_attention.ops.fused.backend import FusedBackend
from nsa_attention.ops.fused.gated_attention import gated_attention
from nsa_attention.ops.fused.launch import CannotLaunchError, Tile
from nsa_attention.ops.mixing import gated_sum
from nsa_attention.ops.selection import Selection
from nsa_attention.ops.sparse_attention import KeysAndValues, sparse_attention

# Gates of 0, of which the interpreter takes the logarithm in numpy.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")
TOLERANCE = 1e-10
WINDOW = 7
SELECTION = Selection(block_len=6, block_stride=3, select_len=5, select_count=4, scale=0.4)
BACKWARD = [
    *("spanned_backward_queries", "spanned_backward_keys", "selected_backward_queries"),
    *("selected_keys", "selected_segments", "selected_backward_keys", "selected_backward_sum"),
]
Gates = Callable[[tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    pairs: tuple[tuple[Tensor, Tensor], ...]
    gates: Tensor
    starts: Tensor | None = None

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, *(tensor for pair in self.pairs for tensor in pair), self.gates]

    def to(self, dtype: torch.dtype, gates: torch.dtype) -> Inputs:
        def leaf(tensor: Tensor, kind: torch.dtype) -> Tensor:
            return tensor.detach().to(kind).requires_grad_()

        pairs = tuple((leaf(k, dtype), leaf(v, dtype)) for k, v in self.pairs)
        return replace(self, q=leaf(self.q, dtype), pairs=pairs, gates=leaf(self.gates, gates))


def inputs(
    heads: tuple[int, int], lengths: Sequence[int], widths: tuple[int, int] = (4, 4), gates: Gates = torch.rand
) -> Inputs:
    """Groups and heads of each; tokens of a sequence, or of packed ones."""
    (groups, per_group), tokens = heads, sum(lengths)
    blocks = sum(max(0, (length - 6) // 3 + 1) for length in lengths)

    def leaf(heads: int, length: int, width: int) -> Tensor:
        return torch.randn(1, heads, length, width, dtype=torch.float64, requires_grad=True)

    pairs = tuple(
        (leaf(groups, length, widths[0]), leaf(groups, length, widths[1])) for length in (blocks, tokens, tokens)
    )
    # As the layer's gate leaves them: [c, B, H, T], the heads of a token side by side.
    gates_BTcH = gates((1, tokens, 3, groups * per_group)).double()
    starts = None
    if len(lengths) > 1:
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Inputs(
        q=leaf(groups * per_group, tokens, widths[0]),
        pairs=pairs,
        gates=gates_BTcH.permute(2, 0, 3, 1).requires_grad_(),
        starts=starts,
    )


def of_any_sign(shape: tuple[int, ...]) -> Tensor:
    """A third of the gates is 0."""
    return torch.randn(shape) * (torch.rand(shape) > 0.33)


def at_once(of: Inputs, window: int = WINDOW, *, deterministic: bool = True) -> Tensor:
    options = {"window": window, "starts": of.starts, "deterministic": deterministic}
    return gated_attention(of.q, of.pairs, of.gates, SELECTION, **options)[0]


def with_atomics(of: Inputs, window: int = WINDOW) -> Tensor:
    return at_once(of, window, deterministic=False)


def public(of: Inputs, implementation: Implementation, window: int = WINDOW) -> Tensor:
    branches = KeysAndValues(compressed=of.pairs[0], selected=of.pairs[1], sliding=of.pairs[2])
    options = {"window": window, "implementation": implementation, "cu_seqlens": of.starts}
    return sparse_attention(of.q, branches, of.gates, SELECTION, **options)


def apart(of: Inputs, backend: Any = None) -> Tensor:
    """By an operator for each branch, and one for the sum."""
    backend, (compressed, chosen, sliding) = backend or FusedBackend(), of.pairs
    lengths, numbers = {"block_len": 6, "block_stride": 3}, {"scale": SELECTION.scale, "starts": of.starts}
    first, lse = backend.attend_compressed(of.q, *compressed, **lengths, **numbers)
    indices = backend.select(of.q.detach(), compressed[0].detach(), lse, SELECTION, starts=of.starts)
    second, _ = backend.attend_selected(of.q, *chosen, indices, select_len=5, **numbers)
    third, _ = backend.attend_sliding(of.q, *sliding, window=WINDOW, **numbers)
    return gated_sum((first, second, third), of.gates)


def with_gradients(operation: Callable[[Inputs], Tensor], of: Inputs, upstream: Tensor) -> list[Tensor]:
    output = operation(of)
    return [output.detach(), *torch.autograd.grad(output, of.leaves, upstream.to(output.dtype))]


def upstream_of(inputs: Inputs) -> Tensor:
    heads, tokens = inputs.q.shape[1:3]
    return torch.randn(1, tokens, heads, inputs.pairs[0][1].shape[3], dtype=torch.float64)


@contextmanager
def small_tiles(monkeypatch: pytest.MonkeyPatch, *, described: bool = True) -> Iterator[None]:
    tuning.clear()
    with monkeypatch.context() as patch:
        patch.setattr(tuning.TuningKey, "tiles", lambda _self, *_sizes: [Tile(rows=16, keys=16)])
        patch.setattr(spanned, "MAX_PARTS", 2)
        patch.setattr(descriptors, "supports_descriptors", lambda _tensor: described)
        yield
    tuning.clear()


@pytest.mark.parametrize(
    ("heads", "lengths", "widths", "gates"),
    [
        ((1, 3), [21], (6, 5), of_any_sign),
        ((2, 2), [9, 0, 5, 3], (4, 8), of_any_sign),
        ((1, 2), [4], (4, 3), torch.rand),
        ((1, 1), [1], (4, 4), torch.zeros),
    ],
    ids=["three heads a group", "packed", "no complete block, gates above 0", "one token, gates of 0"],
)
def test_output_and_gradients_are_those_of_an_operator_for_each(
    heads: tuple[int, int],
    lengths: list[int],
    widths: tuple[int, int],
    gates: Gates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = inputs(heads, lengths, widths, gates)
    upstream = upstream_of(of)
    theirs = with_gradients(apart, of, upstream)
    with small_tiles(monkeypatch):
        ours = with_gradients(at_once, of, upstream)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "gate_dtype"), [(torch.float32, torch.float16), (torch.float16, torch.float32)], ids=str
)
@pytest.mark.parametrize("fused", [at_once, with_atomics])
def test_errors_are_at_most_twice_those_of_plain_torch(
    fused: Callable[[Inputs], Tensor], dtype: torch.dtype, gate_dtype: torch.dtype
) -> None:
    """Gates may be of another dtype, and so is their gradient."""
    rounded = inputs((1, 4), [40], (16, 16), of_any_sign).to(dtype, gate_dtype)
    upstream = upstream_of(rounded).to(dtype)

    def plain(of: Inputs) -> Tensor:
        return public(of, Implementation.EAGER)

    ours, theirs = (with_gradients(operation, rounded, upstream) for operation in (fused, plain))
    exact = with_gradients(plain, rounded.to(torch.float64, torch.float64), upstream)
    assert [tensor.dtype for tensor in ours] == [dtype] * 8 + [gate_dtype]
    for our, their, true in zip(ours, theirs, exact, strict=True):
        assert float((our - true).abs().max()) <= 2 * float((their - true).abs().max())


@pytest.mark.parametrize("tiles", ["one tile", "small tiles"])
@pytest.mark.parametrize(
    ("heads", "lengths", "widths", "gates", "window"),
    [
        ((1, 3), [41], (6, 5), of_any_sign, WINDOW),
        ((3, 1), [37], (4, 4), of_any_sign, 64),
        ((2, 2), [19, 0, 5, 3, 12], (4, 8), of_any_sign, 2),
        ((1, 16), [23], (3, 17), torch.rand, WINDOW),
        ((1, 2), [4], (4, 3), torch.rand, WINDOW),
        ((1, 1), [1], (4, 4), torch.zeros, 1),
    ],
    ids=["three heads a group", "one head a group, long window", "packed", "16 heads", "no block", "gates of 0"],
)
def test_with_atomics_gradients_are_those_of_plain_torch_and_of_the_deterministic_pass(
    heads: tuple[int, int],
    lengths: list[int],
    widths: tuple[int, int],
    gates: Gates,
    window: int,
    tiles: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With small tiles, two programs for each tile of keys divide the queries."""
    of = inputs(heads, lengths, widths, gates)
    upstream = upstream_of(of)
    with small_tiles(monkeypatch, described=False) if tiles == "small tiles" else nullcontext():
        ours, again = (with_gradients(partial(run, window=window), of, upstream) for run in (with_atomics, at_once))
    theirs = with_gradients(lambda of: public(of, Implementation.EAGER, window), of, upstream)
    for our, deterministic, their in zip(ours, again, theirs, strict=True):
        torch.testing.assert_close(our, deterministic, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(our, their, rtol=0, atol=TOLERANCE)


def test_with_atomics_one_kernel_has_the_products_of_the_compressed_and_one_of_the_sliding_branch() -> None:
    of = inputs((1, 2), [14])
    output = with_atomics(of)
    launch.launches.clear()
    output.sum().backward()
    once = {*BACKWARD, "selected_unions"} - {"spanned_backward_queries", "spanned_backward_keys"}
    assert launch.launches == dict.fromkeys(once, 1) | {"spanned_statistics": 2, "spanned_backward_keys": 2}


@pytest.mark.parametrize("warn_only", [False, True])
def test_torch_use_deterministic_algorithms_takes_precedence(warn_only: bool) -> None:
    """It counts when the backward pass runs, not when the operation is called."""
    of = inputs((1, 2), [14], gates=of_any_sign)
    upstream = upstream_of(of)
    expected, output = with_gradients(at_once, of, upstream)[1:], with_atomics(of)
    launch.launches.clear()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        gradients = torch.autograd.grad(output, of.leaves, upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    assert launch.launches["spanned_statistics"] == 0
    assert launch.launches["spanned_backward_queries"] == 2
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("wanted", "atomic", "queries"),
    [
        (["q", "k of selected"], 0, 2),
        (["q", "v of sliding", "gates"], 1, 1),
        (["k of compressed", "v of compressed", "gates"], 0, 2),
        (["q", "v of compressed"], 1, 1),
    ],
    ids=["no key of a span", "sliding", "no queries", "compressed"],
)
def test_atomics_are_used_if_queries_and_keys_of_a_branch_need_gradients(
    wanted: list[str], atomic: int, queries: int
) -> None:
    of = inputs((1, 2), [14], gates=of_any_sign)
    names = ["q", *(f"{one} of {branch}" for branch in ("compressed", "selected", "sliding") for one in "kv"), "gates"]
    upstream = upstream_of(of)
    theirs = dict(zip(names, with_gradients(apart, of, upstream)[1:], strict=True))
    for name, leaf in zip(names, of.leaves, strict=True):
        leaf.requires_grad_(name in wanted)
    output = with_atomics(of)
    launch.launches.clear()
    ours = torch.autograd.grad(output, [leaf for leaf in of.leaves if leaf.requires_grad], upstream)
    for name, our in zip([name for name in names if name in wanted], ours, strict=True):
        torch.testing.assert_close(our, theirs[name], rtol=0, atol=TOLERANCE)
    assert launch.launches["spanned_statistics"] == atomic
    assert launch.launches["spanned_backward_queries"] == queries


def test_atomics_by_descriptor_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs the programs one after another. It lacks this operation of descriptors."""
    of = inputs((1, 4), [40], (16, 16), of_any_sign).to(torch.float32, torch.float32)
    upstream = upstream_of(of)
    added = []

    def add(builder: InterpreterBuilder, _kind: Any, target: Any, value: Any, indices: Any) -> None:
        added.append(value.data.shape)
        pointers, mask = target.materialize_pointers(indices)
        total = builder.create_descriptor_load(target, indices, None, None).data + value.data
        builder.create_masked_store(pointers, TensorHandle(total, value.dtype.scalar), mask, None, None)

    monkeypatch.setattr(InterpreterBuilder, "create_descriptor_reduce", add, raising=False)
    results = []
    for described in (False, True):
        with small_tiles(monkeypatch, described=described):
            results.append(with_gradients(with_atomics, of, upstream))
    assert {*added} == {(1, 4, 4, 16)}  # 4 queries with 4 heads
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_keys_that_do_not_exist_add_nothing_to_the_gradient_of_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """For scores as low as these, a key of zeros would get the probability infinity."""
    of = inputs((1, 16), [20]).to(torch.float32, torch.float32)
    with torch.no_grad():
        of.q.fill_(10.0)
        of.pairs[0][0].fill_(-10.0)
    with small_tiles(monkeypatch, described=False):
        gradients = with_gradients(with_atomics, of, upstream_of(of).float())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_the_public_operation_goes_this_way_and_writes_no_gradient_of_an_output() -> None:
    of = inputs((1, 2), [14])
    launch.launches.clear()
    output = public(of, Implementation.TRITON)
    output.sum().backward()  # a gradient without strides
    counted = launch.launches
    assert counted["mix_forward"] == 1
    assert counted["mix_backward"] == 0
    assert {name: counted[name] for name in BACKWARD} == dict.fromkeys(BACKWARD, 1) | {
        "spanned_backward_queries": 2,
        "spanned_backward_keys": 2,
    }


@pytest.mark.parametrize(
    ("wanted", "queries", "keys"),
    [
        (["gates"], 3, 0),
        (["v of compressed", "k of sliding"], 2, 2),
        (["q", "v of sliding", "gates"], 3, 1),
    ],
    ids=["gates", "a value and a key", "queries, a value and gates"],
)
def test_what_needs_no_gradient_costs_none(wanted: list[str], queries: int, keys: int) -> None:
    of = inputs((1, 2), [14], gates=of_any_sign)
    names = ["q", *(f"{one} of {branch}" for branch in ("compressed", "selected", "sliding") for one in "kv"), "gates"]
    upstream = upstream_of(of)
    theirs = dict(zip(names, with_gradients(apart, of, upstream)[1:], strict=True))
    for name, leaf in zip(names, of.leaves, strict=True):
        leaf.requires_grad_(name in wanted)
    launch.launches.clear()
    output = at_once(of)
    ours = torch.autograd.grad(output, [leaf for leaf in of.leaves if leaf.requires_grad], upstream)
    for name, our in zip([name for name in names if name in wanted], ours, strict=True):
        torch.testing.assert_close(our, theirs[name], rtol=0, atol=TOLERANCE)
    counted = launch.launches
    assert counted["spanned_backward_queries"] + counted["selected_backward_queries"] == queries
    assert counted["spanned_backward_keys"] + counted["selected_backward_keys"] == keys


@pytest.mark.parametrize("fused", [at_once, with_atomics])
def test_tiles_are_timed_without_adding_to_the_gradient_twice(
    fused: Callable[[Inputs], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = inputs((1, 2), [8])
    upstream = upstream_of(of)
    theirs = with_gradients(fused, of, upstream)
    real, timed = tuning.TuningKey.of, []

    def time(run: Callable[[Tile], None], tile: Tile) -> float:
        run(tile)
        run(tile)
        timed.append(tile)
        return 1.0

    monkeypatch.setattr(tuning.TuningKey, "of", lambda *words: replace(real(*words), device="a GPU"))
    monkeypatch.setattr(tuning, "_milliseconds", time)
    tuning.clear()
    with tuning.measuring():
        ours = with_gradients(fused, of, upstream)
    tuning.clear()
    assert len(timed) > 10
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_changes_no_bit(reentrant: bool) -> None:
    of = inputs((1, 2), [14], gates=of_any_sign)
    upstream = upstream_of(of)

    def again(one: Inputs) -> Tensor:
        def run(*leaves: Tensor) -> Tensor:
            q, *flat, gates = leaves
            return at_once(replace(one, q=q, pairs=tuple(zip(flat[::2], flat[1::2], strict=True)), gates=gates))

        output: Tensor = checkpoint(run, *one.leaves, use_reentrant=reentrant)
        return output

    def gradients(operation: Callable[[Inputs], Tensor]) -> list[Tensor]:
        for leaf in of.leaves:
            leaf.grad = None
        operation(of).backward(upstream)
        return [leaf.grad for leaf in of.leaves if leaf.grad is not None]

    kept_ones, computed_again = gradients(at_once), gradients(again)
    assert len(kept_ones) == 8
    assert all(torch.equal(one, other) for one, other in zip(kept_ones, computed_again, strict=True))


@pytest.mark.parametrize("fused", [at_once, with_atomics])
def test_a_compiler_traces_it_whole(fused: Callable[[Inputs], Tensor]) -> None:
    of = inputs((1, 2), [14])
    upstream = upstream_of(of)
    launch.launches.clear()
    compiled = with_gradients(torch.compile(fused, backend="aot_eager", fullgraph=True), of, upstream)
    assert launch.launches["spanned_statistics"] == (2 if fused is with_atomics else 0)
    # The interpreter runs the programs one after another, so that atomics too add in the same order.
    for ours, theirs in zip(compiled, with_gradients(fused, of, upstream), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("deterministic", [True, False])
def test_torch_accepts_the_operators(deterministic: bool) -> None:
    of = inputs((1, 2), [7, 6])
    q, *flat, gates = of.leaves
    seen = [
        *spanned.cached_block_spans(q, flat[0], 6, 3, of.starts).tensors(),
        *spanned.cached_window_spans(q, WINDOW, of.starts).tensors(),
    ]
    given = (q, flat, gates, seen, [], of.starts, 6, 3, 5, 4, WINDOW, 0.4, deterministic)
    torch.library.opcheck(gated._gated_attention, given)
    results = [tensor.detach() for tensor in gated._gated_attention(*given)]
    saved = (q.detach(), [one.detach() for one in flat], gates.detach(), seen, of.starts, results[1:])
    for wanted in ([False, True, False, False, False, False, True, True], [True] * 8):
        backward = (torch.randn_like(results[0]), *saved, 6, 3, 5, WINDOW, 0.4, deterministic, wanted)
        torch.library.opcheck(gated._gated_attention_backward, backward, test_utils=("test_schema", "test_faketensor"))


def test_a_second_derivative_is_refused_as_of_the_operators_apart() -> None:
    of = inputs((1, 2), [9])
    (gradient,) = torch.autograd.grad(at_once(of).square().sum(), of.q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        gradient.sum().backward()


def test_what_no_kernel_takes_is_refused() -> None:
    of = inputs((1, 65), [9])
    with pytest.raises(CannotLaunchError, match="65 query heads for 1 groups"):
        at_once(of)


class Allocated(TorchDispatchMode):
    """Bytes of all tensors that operations make, whether they live on or not."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((arguments, options)) if isinstance(one, Tensor)}
        new = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        self.bytes += sum(one.numel() * one.element_size() for one in new if one.untyped_storage()._cdata not in given)
        return result


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_backward_pass_makes_at_most_three_outputs_more_than_a_dense_one(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the shape of the benchmark: a dense one makes the gradients of queries, keys and values."""
    for module in (importance, lists, mix, selected, spanned):
        monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    heads, groups, tokens, width = 64, 4, 65536, 128
    blocks = (tokens - 32) // 16 + 1

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    q, gates = empty(1, heads, tokens, width), empty(3, 1, heads, tokens)
    flat = [empty(1, groups, length, width) for length in (blocks, tokens, tokens) for _ in "kv"]
    seen = [
        *spanned.cached_block_spans(q, flat[0], 32, 16, None).tensors(),
        *spanned.cached_window_spans(q, 512, None).tensors(),
    ]
    output, *results = gated._gated_attention(q, flat, gates, seen, [], None, 32, 16, 64, 16, 512, 0.1, deterministic)
    with Allocated() as made:
        gated._gated_attention_backward._init_fn(
            output, q, flat, gates, seen, None, results, 32, 16, 64, 512, 0.1, deterministic, [True] * 8
        )
    size = output.numel() * output.element_size()
    dense = size * (1 + 2 * groups / heads)
    # The gradients alone are the dense ones, and those of two branches more. The sum for atomics is float32.
    float_sum = 0 if deterministic else 2 * size
    assert dense + size * 3 * groups / heads < made.bytes - float_sum <= dense + 3 * size
