"""What went wrong in other implementations cannot happen here: the cases that no other test owns."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nsa_attention.config import Attention, Implementation, NSAConfig
from nsa_attention.model import TinyLM
from nsa_attention.ops import mixing
from nsa_attention.ops.attend import CompletedBlocks, selected_attention
from nsa_attention.ops.blockwise import blockwise
from nsa_attention.ops.fused import gated_attention, importance, launch, lists, mix, selected, spanned
from nsa_attention.ops.kernels import EagerKernel
from nsa_attention.ops.selection import Selection
from nsa_attention.ops.sparse_attention import KeysAndValues, sparse_attention

TOLERANCE = 1e-10
FUSED = Path(selected.__file__).parent
META = torch.device("meta")
Operation = Callable[[Tensor, Tensor, Tensor], Tensor]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def leaves(tokens: int, width: int = 4, values: int = 3, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return leaf(1, heads, tokens, width), leaf(1, 1, tokens, width), leaf(1, 1, tokens, values)


def some_indices(tokens: int, select_len: int) -> Tensor:
    return torch.randint(-1, -(-tokens // select_len), (1, 1, tokens, 3), dtype=torch.int32)


def by_kernel(tokens: int, select_len: int, scale: float) -> Operation:
    indices = some_indices(tokens, select_len)
    return lambda q, k, v: selected.fused_selected_attention(q, k, v, indices, select_len=select_len, scale=scale)[0]


def by_spans(tokens: int, window: int, scale: float) -> Operation:
    seen = spanned.window_spans(tokens, window, None, torch.device("cpu"))
    return lambda q, k, v: spanned.spanned_attention(q, k, v, seen, scale)[0]


def by_tiles(tokens: int, select_len: int, scale: float) -> Operation:
    indices = some_indices(tokens, select_len)
    numbers = {"select_len": select_len, "scale": scale, "kernel": EagerKernel()}
    return lambda q, k, v: selected_attention(q, k, v, indices, **numbers)[0]


def by_blocks(tokens: int, select_len: int, scale: float) -> Operation:
    indices = some_indices(tokens, select_len)
    return lambda q, k, v: blockwise(q, k, v, indices, select_len=select_len, scale=scale)[0]


def by_gates(tokens: int, _: int, scale: float) -> Operation:
    gates = torch.rand(2, 1, 2, tokens, dtype=torch.float64)
    return lambda q, _k, _v: mixing.mix_by_tiles([q, scale * q], gates)


def by_all_at_once(tokens: int, select_len: int, scale: float) -> Operation:
    gates = torch.randn(3, 1, 2, tokens, dtype=torch.float64)
    selection = Selection(block_len=1, block_stride=1, select_len=select_len, select_count=3, scale=scale)
    return lambda q, k, v: gated_attention.gated_attention(q, [(k, v)] * 3, gates, selection, window=select_len)[0]


MAKERS = [by_kernel, by_spans, by_tiles, by_blocks, by_gates, by_all_at_once]


def nodes(output: Tensor) -> Iterator[Node]:
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
            waiting += [parent for parent, _ in node.next_functions]


def tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_what_a_backward_pass_needs_goes_through_the_hooks_of_saved_tensors(make: Callable[..., Operation]) -> None:
    """Offloading and checkpointing see nothing else: a tensor that is an attribute of the node stays in memory."""
    inputs, operation = leaves(9), make(9, 4, 0.5)
    kept: list[Tensor] = []

    def keep_elsewhere(tensor: Tensor) -> int:
        kept.append(tensor.detach().clone())
        return len(kept) - 1

    with saved_tensors_hooks(keep_elsewhere, kept.__getitem__):
        output = operation(*inputs)
    assert len(kept) >= 3
    attributes = [node.__dict__ for node in nodes(output) if hasattr(node, "__dict__")]
    assert attributes  # of the operator's node: those of torch's own operations have none
    assert not tensors_in(attributes)
    upstream = torch.randn_like(output)
    theirs = torch.autograd.grad(operation(*inputs), inputs, upstream, allow_unused=True, materialize_grads=True)
    ours = torch.autograd.grad(output, inputs, upstream, allow_unused=True, materialize_grads=True)
    assert all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_backward_pass_belongs_to_its_own_forward_pass(make: Callable[..., Operation]) -> None:
    """Two calls with different numbers, then their gradients: no state that both share lies between the passes."""
    cases = [(leaves(9), make(9, 4, 0.5)), (leaves(6), make(6, 2, 1.5))]
    outputs = [operation(*inputs) for inputs, operation in cases]
    for (inputs, operation), output in zip(cases, outputs, strict=True):
        upstream = torch.randn_like(output)
        options = {"allow_unused": True, "materialize_grads": True}
        ours = torch.autograd.grad(output, inputs, upstream, **options)
        theirs = torch.autograd.grad(operation(*inputs), inputs, upstream, **options)
        assert all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


class Planned:
    """The launches of one pass over tensors without data: names and numbers of programs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.grids: list[tuple[str, int]] = []
        for module in (importance, lists, mix, selected, spanned):
            monkeypatch.setattr(module, "launch", self.launch)

    def launch(self, kernel: Any, programs: int, *_: object, **__: object) -> None:
        self.grids.append((kernel.__name__, programs))

    def run(
        self, *, tokens: int = 40, heads: int = 4, groups: int = 2, values: int = 16, packed: bool = False
    ) -> list[tuple[str, int]]:
        """The operators' own bodies, which on these tensors torch would replace by their shapes."""
        self.grids.clear()
        numbers = {"device": META, "dtype": torch.bfloat16}
        starts = torch.empty(4, dtype=torch.int32, device=META) if packed else None
        blocks = CompletedBlocks(6, 3).count(tokens)
        q = torch.empty(1, heads, tokens, 16, **numbers)
        outputs = [
            self._spanned(q, blocks, groups, values, spanned.block_spans(tokens, blocks, 6, 3, starts, META)),
            self._spanned(q, tokens, groups, values, spanned.window_spans(tokens, 7, starts, META)),
            self._selected(q, groups, values, starts),
        ]
        keys = torch.empty(1, groups, blocks, 16, **numbers)
        lse = torch.empty(1, heads, tokens, device=META)
        selection = Selection(block_len=6, block_stride=3, select_len=5, select_count=4, scale=0.25)
        importance.select_by_importance(q.half(), keys.half(), lse, selection, starts=starts)
        gates = torch.empty(3, 1, heads, tokens, **numbers)
        mix.weighted_sum(outputs, gates)
        return list(self.grids)

    def _spanned(self, q: Tensor, keys: int, groups: int, values: int, seen: spanned.Spans) -> Tensor:
        k, v = (q.new_empty(1, groups, keys, width) for width in (q.shape[3], values))
        output, lse = spanned._spanned_attention_op._init_fn(q, k, v, *seen.tensors(), 0.25, seen.pattern)
        spanned._spanned_attention_backward_op._init_fn(
            output, q, k, v, *seen.tensors(), output, lse, 0.25, seen.pattern
        )
        return output

    def _selected(self, q: Tensor, groups: int, values: int, starts: Tensor | None) -> Tensor:
        tokens = q.shape[2]
        k, v = (q.new_empty(1, groups, tokens, width) for width in (q.shape[3], values))
        indices = torch.empty(1, groups, tokens, 4, dtype=torch.int32, device=META)
        numbers = (5, 0.25, [], 64)
        chosen = (indices, starts)
        output, lse = selected._selected_attention_op._init_fn(q, k, v, *chosen, *numbers)
        selected._selected_attention_backward_op._init_fn(output, q, k, v, *chosen, output, lse, *numbers)
        return output


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    return Planned(monkeypatch)


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
def test_no_launch_waits_for_a_value_from_the_device(planned: Planned, packed: bool) -> None:
    """Tensors without data have no value to ask for: each of `item`, `tolist` and a truth value raises."""
    assert {name for name, _ in planned.run(packed=packed)} == {
        "spanned_forward",
        "spanned_backward_queries",
        "spanned_backward_keys",
        "ranked_blocks",
        "selected_unions",
        "selected_forward",
        "selected_backward_queries",
        "selected_keys",
        "selected_segments",
        "selected_backward_keys",
        "selected_backward_sum",
        "mix_forward",
    }


def test_a_pass_has_as_many_launches_for_any_number_of_heads_and_tokens(planned: Planned) -> None:
    few, many = planned.run(tokens=40, heads=2, groups=1), planned.run(tokens=5000, heads=64, groups=8)
    assert [name for name, _ in few] == [name for name, _ in many]
    assert len(few) == 16


def test_one_program_holds_all_values_of_its_rows(planned: Planned) -> None:
    """Programs that split the values would each subtract delta, and race for the log-sum-exp."""
    narrow, wide = (
        [grid for grid in planned.run(values=values) if not grid[0].startswith("mix")] for values in (16, 256)
    )
    assert narrow == wide


@pytest.mark.parametrize(("width", "values"), [(4, 130), (192, 128)], ids=str)
def test_values_may_be_wider_or_narrower_than_keys(width: int, values: int) -> None:
    tokens, gates = 9, torch.rand(3, 1, 4, 9, dtype=torch.float64)
    selection = Selection(block_len=4, block_stride=2, select_len=3, select_count=3, scale=width**-0.5)
    lengths = {"compressed": CompletedBlocks(4, 2).count(tokens), "selected": tokens, "sliding": tokens}
    branches = KeysAndValues(**{name: (leaf(1, 1, n, width), leaf(1, 1, n, values)) for name, n in lengths.items()})
    inputs = (leaf(1, 4, tokens, width), *branches.compressed, *branches.selected, *branches.sliding)
    results = []
    for implementation in (Implementation.TRITON, Implementation.EAGER):
        output = sparse_attention(inputs[0], branches, gates, selection, window=3, implementation=implementation)
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), inputs)])
    torch.testing.assert_close(*results, rtol=0, atol=TOLERANCE)


def test_a_grid_has_one_axis_the_only_one_that_may_be_long() -> None:
    grids: list[tuple[int, ...]] = []

    class Kernel:
        __name__ = "kernel"

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    launch.launch(Kernel(), 70_000)
    launch.launch(Kernel(), 0)
    assert grids == [(70_000,)]


ADDS_QUERIES = "p_dq is not None"


@pytest.mark.parametrize("module", sorted(FUSED.glob("*.py")), ids=lambda path: path.stem)
def test_kernels_know_one_axis_and_no_atomic_operation_by_default(module: Path) -> None:
    """Atomic sums come in another order each time: the same input would give other bits.

    Only one function adds numbers with atomics, and runs only if a kernel gets the sum of `deterministic=False`. A
    counter of finished programs is the same in any order.
    """
    tree = ast.parse(module.read_text())
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for call in calls_in(function):
            name = ast.unparse(call.func)
            is_counter = name == "tl.atomic_add" and ast.unparse(call.args[1]) == "1"
            assert is_counter or function.name == "add_queries" or ".atomic_" not in name, f"line {call.lineno}"
            assert name not in ("tl.program_id", "tl.num_programs") or ast.unparse(call.args[0]) == "0"
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == ADDS_QUERIES]
    guarded = [call for guard in guards for call in calls_in(guard)]
    assert [call for call in calls_in(tree) if ast.unparse(call.func) == "add_queries" and call not in guarded] == []


def calls_in(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def launched_kernels() -> Iterator[ast.FunctionDef]:
    trees = [ast.parse(path.read_text()) for path in sorted(FUSED.glob("*.py"))]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "launch"}
    functions = (node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef))
    yield from (node for node in functions if node.name in names)


SIZES = " batch groups tokens keys places blocks tiles parts results segments partials length batch_groups branch "
CONSTANTS = (
    " SCALE EXPONENT EXACT HEADS HEADS_PADDED HEADS_1 HEADS_2 HEADS_3 HEADS_4 D D_PADDED E E_PADDED PAIRS_PADDED ACC "
    "BLOCK_LEN BLOCK_STRIDE SELECT_LEN PLACES PLACES_PADDED LOG_PLACES TAPS REACHES BRANCHES QUERIES LOG_QUERIES "
    "LOG_WIDTH LOG_CHUNK TILES BLOCKS ROWS KEYS DESCRIBED ADDS SIGNED "
)

# Of the one that rotates up to four tensors.
SIZES += "".join(f"tokens_{n} sines_{n} sequence_{n} token_{n} " for n in range(1, 5)) + "sign "

# Of those that read pages.
SIZES += "table_row columns block_parts rows shares "
CONSTANTS += "PAGE_LEN COMPRESSES SELECTS SLIDES SPAN PIECE "


@pytest.mark.parametrize("kernel", [*launched_kernels()], ids=lambda kernel: kernel.name)
def test_kernels_take_the_same_things_by_the_same_names_in_the_same_order(kernel: ast.FunctionDef) -> None:
    names = [argument.arg for argument in kernel.args.args]
    tensors = list(takewhile(lambda name: name[:2] in ("p_", "s_"), names))
    constants = [argument.arg for argument in kernel.args.args if argument.annotation]
    sizes = names[len(tensors) : len(names) - len(constants)]
    # A stride stands behind its own tensor; tensors without strides come last.
    assert re.fullmatch(r"(p_(\w+)( s_\2[a-z])+ )*(p_\w+ )*", " ".join([*tensors, ""]))
    assert sizes == sorted(sizes, key=lambda name: SIZES.index(f" {name} "))
    assert constants == sorted(constants, key=lambda name: CONSTANTS.index(f" {name} "))
    assert tensors
    assert sizes
    assert names == [*tensors, *sizes, *constants]
    # Not `triton.jit`, which would compile it anew for a length that 16 divides and for one that it does not.
    assert [ast.unparse(decorator) for decorator in kernel.decorator_list] == ["for_any_length"]


@pytest.mark.parametrize(
    ("attention", "implementation"),
    [
        (Attention.NSA, Implementation.AUTO),
        (Attention.NSA, Implementation.EAGER),
        (Attention.NSA, Implementation.TRITON),
        (Attention.VANILLA, Implementation.AUTO),
    ],
)
def test_no_training_step_gives_a_mask_to_the_attention_that_torch_picks(
    tiny: NSAConfig, attention: Attention, implementation: Implementation
) -> None:
    """With a mask it may pick cuDNN's, whose backward pass gives NaN at some lengths (pytorch #196678)."""
    calls: list[dict[str, Any]] = []

    class Spy(TorchFunctionMode):
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is functional.scaled_dot_product_attention:
                calls.append(dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {}))
            return function(*args, **(kwargs or {}))

    config = replace(tiny, layers=1, attention=attention, seq_len=7)
    with Spy():
        TinyLM.from_config(config, implementation)(torch.zeros(1, 7, dtype=torch.long)).sum().backward()
    assert len(calls) == (attention is Attention.VANILLA)
    assert all(call.get("attn_mask") is None and call["is_causal"] for call in calls)
