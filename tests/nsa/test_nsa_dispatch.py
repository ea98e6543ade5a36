"""Who computes a branch, why, and what is said when what was asked for is not there."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_attention.attention import NSAttention
from nsa_attention.config import CI, Attention, Branch, Implementation
from nsa_attention.decode import prefill, step
from nsa_attention.model import TinyLM
from nsa_attention.ops import dispatch
from nsa_attention.ops.attend import sliding_attention
from nsa_attention.ops.backends import SlidingBackend, flash_attn_sliding, torch_flash_sliding
from nsa_attention.ops.dispatch import (
    MissingImplementationError,
    implementation_for,
    implementation_for_select,
    implementation_for_selected,
    implementation_for_sliding,
)
from nsa_attention.ops.kernels import EagerKernel
from nsa_attention.ops.selection import Selection
from nsa_attention.ops.sparse_attention import KeysAndValues, sparse_attention

CPU = torch.device("cpu")
SELECTION = Selection(block_len=4, block_stride=2, select_len=4, select_count=3, scale=0.5)
ZEROS = torch.zeros(1, 2, 9, 8)
NOTHING = KeysAndValues(compressed=(ZEROS[:, :, :3],) * 2, selected=(ZEROS, ZEROS), sliding=(ZEROS, ZEROS))


class OnAGpu:
    """What the dispatcher reads of a tensor, for one that a machine without a GPU cannot make."""

    is_cuda = True

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, SimpleNamespace(type=device)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[OnAGpu, OnAGpu, OnAGpu]]:
    """Queries, keys and values on a GPU of this compute capability; triton can be imported."""

    def tensors(
        heads: int = 8, groups: int = 2, width: int = 64, values: int = 64, capability: tuple[int, int] = (9, 0), **more
    ) -> tuple[OnAGpu, OnAGpu, OnAGpu]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        monkeypatch.setattr(dispatch, "triton_import_reason", lambda: None)
        monkeypatch.setattr(dispatch, "_triton", lambda: "the fused kernels")
        return (
            OnAGpu(1, heads, 9, width, **more),
            OnAGpu(1, groups, 9, width, **more),
            OnAGpu(1, groups, 9, values, **more),
        )

    return tensors


def plain(width: int = 8, values: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 4, 9, width), torch.randn(1, 2, 9, width), torch.randn(1, 2, 9, values)


def test_on_a_cpu_auto_takes_torch_s_flash_attention_and_says_why() -> None:
    backend, used = implementation_for(Implementation.AUTO, *plain())
    assert (backend.name, used.name, used.reason) == ("fused_cpu", "fused_cpu", "auto: fastest on a CPU")


def test_on_a_cpu_long_sequences_are_read_block_by_block() -> None:
    q, k, v = torch.randn(1, 4, 1024, 8), torch.randn(1, 2, 1024, 8), torch.randn(1, 2, 1024, 8)
    backend, used = implementation_for_selected(Implementation.AUTO, q, k, v, 16, 32)
    assert (backend.name, used.name) == ("blockwise", "blockwise")
    assert used.reason == "auto: fastest on a CPU: 1024 tokens"
    backend, used = implementation_for_selected(Implementation.AUTO, q, k, v, 17, 32)
    assert (backend.name, used.name) == ("fused_cpu", "fused_cpu")
    assert used.reason == "auto: fastest on a CPU: 17 blocks of 32 tokens are more than half of 1024 tokens"
    assert implementation_for_selected(Implementation.EAGER, q, k, v, 16, 32)[0].name == "eager"


def test_all_scores_at_once_are_taken_in_every_branch_where_they_were_asked_for() -> None:
    q, k, v = plain()
    wanted = Implementation.DENSE
    chosen = [implementation_for(wanted, q, k, v), implementation_for_sliding(wanted, q, k, v)]
    assert [used.name for _, used in (*chosen, implementation_for_selected(wanted, q, k, v, 3, 4))] == ["dense"] * 3


def test_the_loop_over_tokens_is_taken_where_it_was_asked_for_and_in_the_selected_branch_alone() -> None:
    q, k, v = plain()
    loop, used = implementation_for_selected(Implementation.PER_TOKEN, q, k, v, 4, 4)
    assert (loop.name, used.name, used.reason) == ("per_token", "per_token", "asked for")
    assert implementation_for(Implementation.PER_TOKEN, q, k, v)[1].name == "fused_cpu"
    packed = torch.tensor([0, 4, 9], dtype=torch.int32)
    indices = torch.zeros(1, 2, 9, 3, dtype=torch.int32)
    together, _ = loop.attend_selected(q, k, v, indices, select_len=4, scale=1.0, starts=packed)
    alone, _ = loop.attend_selected(*(one[:, :, 4:] for one in (q, k, v, indices)), select_len=4, scale=1.0)
    torch.testing.assert_close(together[:, :, 4:], alone)


def test_where_that_cannot_be_auto_takes_plain_torch_and_says_why() -> None:
    backend, used = implementation_for(Implementation.AUTO, *plain(values=6))
    assert backend.name == "eager"
    assert used.reason == "auto: keys of width 8 and values of width 6 differ"


def test_on_a_gpu_auto_takes_the_fused_kernels(gpu: Callable[..., tuple[OnAGpu, ...]]) -> None:
    backend, used = implementation_for(Implementation.AUTO, *gpu())
    assert backend == "the fused kernels"
    assert (used.name, used.reason) == ("triton", "auto: fused kernels for this GPU")


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"width": 320}, "keys or values of width 320, and the kernels take up to 256"),
        ({"heads": 130, "groups": 1}, "130 query heads share a key head, and the kernels take up to 64"),
        ({"capability": (7, 5)}, "the GPU has compute capability 7.5 and the kernels need 8.0"),
        ({"device": "xpu"}, "the kernels run on CUDA and the device is xpu"),
    ],
    ids=["wide", "many heads", "old", "other"],
)
def test_what_the_kernels_cannot_take_is_a_reason(
    gpu: Callable[..., tuple[OnAGpu, ...]], numbers: dict[str, object], reason: str
) -> None:
    tensors = gpu(**numbers)
    backend, used = implementation_for(Implementation.AUTO, *tensors)
    assert backend.name == "eager"
    assert used.reason == f"auto: {reason}"
    with pytest.raises(MissingImplementationError) as error:
        implementation_for(Implementation.TRITON, *tensors)
    assert str(error.value) == f"--impl triton: {reason}; use --impl auto"


def test_tensors_of_several_dtypes_are_a_reason(gpu: Callable[..., tuple[OnAGpu, ...]]) -> None:
    q, k, _ = gpu()
    _, _, v = gpu(dtype=torch.float32)
    used = implementation_for(Implementation.AUTO, q, k, v)[1]
    assert used.reason == "auto: queries, keys and values are torch.bfloat16, torch.float32"


def test_triton_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_import_reasons", [])
    monkeypatch.setitem(sys.modules, "nsa_attention.ops.fused.backend", None)
    with pytest.raises(MissingImplementationError, match=r"--impl triton: triton cannot be imported \(.*pip install"):
        implementation_for(Implementation.TRITON, *plain())


def test_on_a_cpu_triton_needs_its_interpreter() -> None:
    """In a process of its own: whether Triton interprets is settled when it is imported."""
    script = (
        "import torch; from nsa_attention.ops.dispatch import *; q = torch.empty(1, 1, 1, 16);"
        "implementation_for(Implementation.TRITON, q, q, q)"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (
        "--impl triton: the kernels run on CUDA and the device is cpu; TRITON_INTERPRET=1 interprets them"
        in done.stderr
    )


@pytest.mark.parametrize("wanted", [Implementation.FLASH, Implementation.TORCH])
def test_the_flash_attention_of_others_is_for_the_sliding_branch_on_a_gpu(wanted: Implementation) -> None:
    q, k, v = plain()
    ways: list[Callable[[], object]] = [
        lambda: implementation_for_sliding(wanted, q, k, v),
        lambda: implementation_for(wanted, q, k, v),
        lambda: implementation_for_select(wanted, q, k, v),
        lambda: implementation_for_selected(wanted, q, k, v, 4, 4),
        lambda: TinyLM.from_config(CI, wanted)(torch.zeros(1, 9, dtype=torch.long)),
        lambda: TinyLM.from_config(replace(CI, branches=(Branch.WIN,)), wanted)(torch.zeros(1, 9, dtype=torch.long)),
        lambda: prefill(TinyLM.from_config(CI, wanted), torch.zeros(1, 9, dtype=torch.long)),
        lambda: sparse_attention(q, NOTHING, torch.rand(3, 1, 4, 9), SELECTION, window=3, implementation=wanted),
    ]
    for way in ways:
        with pytest.raises(
            MissingImplementationError, match=f"--impl {wanted}: .* runs on CUDA only and the device is cpu"
        ):
            way()


@pytest.mark.parametrize(
    ("wanted", "config", "reason"),
    [
        (
            "flash",
            {"branches": (Branch.CMP, Branch.SEL)},
            "it computes the branch win alone, and the branches are cmp\\+sel",
        ),
        ("torch", {"branches": (Branch.CMP,)}, "it computes the branch win alone, and the branches are cmp"),
        ("per_token", {"branches": (Branch.WIN,)}, "it computes the branch sel alone, and the branches are win"),
        ("eager", {"attention": Attention.VANILLA}, "attention vanilla has one implementation"),
        ("dense", {"attention": Attention.STOCK}, "attention stock has one implementation"),
    ],
    ids=str,
)
def test_what_would_compute_nothing_of_a_shape_is_refused(wanted: str, config: dict[str, Any], reason: str) -> None:
    shape, said = replace(CI, **config), f"^--impl {wanted}: {reason}; use --impl auto$"
    with pytest.raises(MissingImplementationError, match=said):
        TinyLM.from_config(shape, Implementation(wanted))
    if shape.attention is Attention.NSA:
        with pytest.raises(MissingImplementationError, match=said):
            NSAttention.from_config(shape, Implementation(wanted))
    assert TinyLM.from_config(shape, Implementation.AUTO).config == shape


@pytest.mark.parametrize("wanted", [Implementation.TRITON, Implementation.DENSE, Implementation.PER_TOKEN], ids=str)
def test_tokens_from_a_cache_are_computed_by_plain_torch_or_not_at_all(wanted: Implementation) -> None:
    shape = replace(CI, layers=1, heads=2, groups=1, dim=16, vocab=9)
    model, token = TinyLM.from_config(shape, wanted), torch.zeros(1, 1, dtype=torch.long)
    _, caches = prefill(model, token.expand(1, 5))  # the layer's own forward
    with pytest.raises(
        MissingImplementationError, match=f"--impl {wanted}: only plain torch reads a cache without pages"
    ):
        step(model, token, caches)
    assert caches[0].lengths == [5]


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"values": 32}, "needs keys and values of one width, got 64 and 32"),
        ({"dtype": torch.float32}, r"computes in float16 and bfloat16 and the tensors are torch\.float32"),
    ],
    ids=["widths", "dtype"],
)
@pytest.mark.parametrize("wanted", [Implementation.FLASH, Implementation.TORCH])
def test_tensors_that_flash_attention_cannot_take_are_named(
    gpu: Callable[..., tuple[OnAGpu, ...]],
    monkeypatch: pytest.MonkeyPatch,
    wanted: Implementation,
    numbers: dict[str, object],
    reason: str,
) -> None:
    monkeypatch.setattr(dispatch, "_flash_attn", lambda: flash_attn_varlen_func)
    with pytest.raises(MissingImplementationError, match=reason):
        implementation_for_sliding(wanted, *gpu(**numbers))


def test_a_flash_attn_without_its_cuda_part_is_not_there(gpu: Callable[..., tuple[OnAGpu, ...]], monkeypatch) -> None:
    def broken() -> None:
        raise ModuleNotFoundError("No module named 'flash_attn_2_cuda'")

    monkeypatch.setattr(dispatch, "_flash_attn", broken)
    with pytest.raises(
        MissingImplementationError, match=r"flash-attn cannot be imported .*flash_attn_2_cuda.*install it"
    ):
        implementation_for_sliding(Implementation.FLASH, *gpu())


def test_flash_attention_that_is_there_is_chosen(gpu: Callable[..., tuple[OnAGpu, ...]], monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "_flash_attn", lambda: flash_attn_varlen_func)
    backend, used = implementation_for_sliding(Implementation.FLASH, *gpu())
    assert isinstance(backend, SlidingBackend)
    assert (used.name, used.reason) == ("flash_attn", "asked for")
    assert implementation_for_sliding(Implementation.TORCH, *gpu())[1].name == "torch_flash"


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size
) -> Tensor:
    """A stand-in with flash-attn's contract: groups of heads, and `left` counts the keys before the query's own."""
    assert causal
    assert max_seqlen_q == max_seqlen_k
    return in_windows(q, k, v, cu_seqlens_q, cu_seqlens_k, window_size, softmax_scale, groups=True)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
) -> Tensor:
    """torch 2.13's contract."""
    assert max_q == max_k
    return in_windows(query, key, value, cu_seq_q, cu_seq_k, window_size, scale, groups=enable_gqa)


def varlen_attn_of_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)
) -> Tensor:
    """torch 2.11's contract: as many key heads as query heads."""
    assert max_q == max_k
    return in_windows(query, key, value, cu_seq_q, cu_seq_k, window_size, scale, groups=False)


def in_windows(q, k, v, starts_q, starts_k, window_size, scale, *, groups: bool) -> Tensor:
    assert torch.equal(starts_q, starts_k)
    assert groups or q.shape[1] == k.shape[1]
    left, right = window_size
    parts = []
    for begin, end in zip(starts_q[:-1].tolist(), starts_q[1:].tolist(), strict=True):
        tokens = torch.arange(end - begin)
        distance = tokens[:, None] - tokens
        allowed = (distance >= -right) & (distance <= left)
        heads = (tensor[begin:end].transpose(0, 1) for tensor in (q, k, v))
        result = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=allowed, scale=scale, enable_gqa=groups
        )
        parts.append(result.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize(
    "sliding",
    [
        flash_attn_sliding(flash_attn_varlen_func),
        torch_flash_sliding(varlen_attn),
        torch_flash_sliding(varlen_attn_of_2_11),
    ],
    ids=["flash-attn", "torch 2.13", "torch 2.11"],
)
class TestFlashIsAskedForAWindowOfWKeys:
    def test_in_each_sequence_of_a_batch(self, sliding: Callable[..., Tensor]) -> None:
        q, k, v = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
        ours, _ = sliding_attention(q, k, v, window=6, scale=0.3, kernel=EagerKernel())
        torch.testing.assert_close(sliding(q, k, v, window=6, scale=0.3, starts=None), ours)

    def test_in_each_packed_sequence(self, sliding: Callable[..., Tensor]) -> None:
        q, k, v = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
        starts = torch.tensor([0, 7, 20], dtype=torch.int32)
        backend = dispatch._EAGER
        ours, _ = backend.attend_sliding(q, k, v, window=6, scale=0.3, starts=starts)
        torch.testing.assert_close(sliding(q, k, v, window=6, scale=0.3, starts=starts), ours)


@pytest.mark.parametrize("name", ["flash_attn_varlen_func", "varlen_attn"])
def test_the_stand_ins_have_the_parameters_of_the_real_ones(name: str) -> None:
    """Of torch's we can look; flash-attn's is read where it is installed."""
    module = "flash_attn" if name.startswith("flash") else "torch.nn.attention.varlen"
    real = pytest.importorskip(module)
    ours, theirs = (inspect.signature(function).parameters for function in (globals()[name], getattr(real, name)))
    assert set(ours) - {"enable_gqa"} <= set(theirs)


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
from nsa_attention.ops.dispatch import triton_import_reason
assert triton_import_reason() is None, triton_import_reason()
try:
    import nsa_attention.data
except ImportError as error:
    print(error)
"""


def test_without_numpy_there_are_kernels_and_training_names_what_to_install() -> None:
    """Only Triton's interpreter needs NumPy. A GPU without NumPy must not fall back to plain torch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_NUMPY], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "training needs NumPy: pip install numpy\n", done.stderr
