"""What only a GPU can show of the fused kernels: half types, long sequences, tuning, NCCL. `make test-gpu` runs it.

Error rule: at most twice that of plain torch in the same dtype, both against float64. The same comparison runs once on
a CPU, in the interpreter, so that a machine without a GPU shows that it can fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from torch import Tensor

from benchmarks.roofline import Shape
from nsa_attention.config import CI, Implementation
from nsa_attention.model import Recompute, TinyLM
from nsa_attention.ops.backends import Backend
from nsa_attention.ops.dispatch import flash_reason, implementation_for, implementation_for_sliding, torch_flash_reason
from nsa_attention.ops.fused import launch, tuning
from nsa_attention.ops.fused.gated_attention import gated_attention
from nsa_attention.ops.mixing import gated_sum
from nsa_attention.ops.selection import Selection
from nsa_attention.parallelize import checkpoint_layers, compile_layers
from nsa_attention.warmup import warm_up
from nsa_attention.world import World

needs_gpu = pytest.mark.gpu


LARGE = Shape(tokens=4096, heads=8, groups=2, width=64, value_width=64)
SHAPES = [
    *(replace(LARGE, tokens=tokens) for tokens in (1, 31, 32, 63, 64, 65, 1000, 4096)),
    *(
        replace(LARGE, tokens=1500, heads=heads, groups=groups)
        for heads, groups in ((1, 1), (4, 4), (16, 1), (64, 1), (6, 2))
    ),
    replace(LARGE, tokens=1500, width=128, value_width=128, heads=16, groups=1),
    replace(LARGE, tokens=1500, width=192, value_width=128),
    replace(LARGE, tokens=1500, width=80, value_width=48),
    replace(LARGE, tokens=900, block_len=7, block_stride=5, select_len=9, select_count=5, window=33),
]
HALF = [torch.bfloat16, torch.float16]


class Problem:
    """Random tensors of a shape in a dtype, and what the branches make of them."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        self.shape, self.dtype = shape, dtype
        generator = torch.Generator(device).manual_seed(0)
        blocks = max(0, (shape.tokens - shape.block_len) // shape.block_stride + 1)

        def random(heads: int, length: int, width: int) -> Tensor:
            return torch.randn(1, heads, length, width, generator=generator, device=device).to(dtype)

        self.q = random(shape.heads, shape.tokens, shape.width)
        self.k, self.v = (random(shape.groups, shape.tokens, width) for width in (shape.width, shape.value_width))
        self.k_blocks, self.v_blocks = (
            random(shape.groups, blocks, width) for width in (shape.width, shape.value_width)
        )
        self.upstream = random(shape.heads, shape.tokens, shape.value_width)
        self.selection = Selection(
            block_len=shape.block_len,
            block_stride=shape.block_stride,
            select_len=shape.select_len,
            select_count=shape.select_count,
            scale=shape.width**-0.5,
        )
        plain, _ = implementation_for(Implementation.EAGER, self.q, self.k, self.v)
        self.indices = plain.select(self.q, self.k_blocks, None, self.selection)

    def results(self, backend: Backend, branch: str, dtype: torch.dtype) -> list[Tensor]:
        """Output and gradients of queries, keys and values."""
        tensors = (self.q, self.k_blocks, self.v_blocks) if branch == "compressed" else (self.q, self.k, self.v)
        q, k, v = (tensor.to(dtype).requires_grad_() for tensor in tensors)
        shape, scale = self.shape, self.selection.scale
        if branch == "compressed":
            lengths = {"block_len": shape.block_len, "block_stride": shape.block_stride}
            output, _ = backend.attend_compressed(q, k, v, **lengths, scale=scale)
        elif branch == "selected":
            output, _ = backend.attend_selected(q, k, v, self.indices, select_len=shape.select_len, scale=scale)
        else:
            output, _ = backend.attend_sliding(q, k, v, window=shape.window, scale=scale)
        return [output.detach(), *torch.autograd.grad(output, (q, k, v), self.upstream.to(dtype))]


def assert_at_most_twice_the_error_of_plain_torch(problem: Problem, branch: str) -> None:
    plain, _ = implementation_for(Implementation.EAGER, problem.q, problem.k, problem.v)
    fused, _ = implementation_for(Implementation.TRITON, problem.q, problem.k, problem.v)
    truth = problem.results(plain, branch, torch.float64)
    theirs = problem.results(plain, branch, problem.dtype)
    for name, our, their, true in zip(
        ("output", "dq", "dk", "dv"), problem.results(fused, branch, problem.dtype), theirs, truth, strict=True
    ):
        allowed = 2 * float((their - true).abs().max()) if true.numel() else 0.0
        found = float((our - true).abs().max()) if true.numel() else 0.0
        assert found <= allowed, f"{branch} {name} {problem.shape}: {found} of {allowed}"


def all_at_once(problem: Problem, *, deterministic: bool = True) -> None:
    """The operator for all branches, with gates of any sign, against plain torch on the blocks that it chose."""
    fused, _ = implementation_for(Implementation.TRITON, problem.q, problem.k, problem.v)
    plain, _ = implementation_for(Implementation.EAGER, problem.q, problem.k, problem.v)
    shape, selection = problem.shape, problem.selection
    lengths, scale = {"block_len": shape.block_len, "block_stride": shape.block_stride}, selection.scale
    _, lse = fused.attend_compressed(problem.q, problem.k_blocks, problem.v_blocks, **lengths, scale=scale)
    indices = fused.select(problem.q, problem.k_blocks, lse, selection)
    gates = torch.randn(3, *problem.q.shape[:3], device=problem.q.device).to(problem.dtype)
    tensors = (problem.q, problem.k_blocks, problem.v_blocks, problem.k, problem.v, problem.k, problem.v, gates)
    upstream = problem.upstream.transpose(1, 2)

    def results(dtype: torch.dtype, *, at_once: bool = False) -> list[Tensor]:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
        q, k_blocks, v_blocks, k, v, k_last, v_last, weights = leaves
        if at_once:
            pairs = ((k_blocks, v_blocks), (k, v), (k_last, v_last))
            options = {"window": shape.window, "deterministic": deterministic}
            output = gated_attention(q, pairs, weights, selection, **options)[0]
        else:
            first, _ = plain.attend_compressed(q, k_blocks, v_blocks, **lengths, scale=scale)
            second, _ = plain.attend_selected(q, k, v, indices, select_len=shape.select_len, scale=scale)
            third, _ = plain.attend_sliding(q, k_last, v_last, window=shape.window, scale=scale)
            output = gated_sum((first, second, third), weights)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(dtype))]

    ours, theirs, truth = results(problem.dtype, at_once=True), results(problem.dtype), results(torch.float64)
    # Of nine tensors the largest error of one is luck; all errors of a tensor together are not.
    for our, their, true in zip(ours, theirs, truth, strict=True):
        assert float((our - true).norm()) <= 2 * float((their - true).norm()), shape


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_comparison_of_all_at_once_runs_in_the_interpreter(deterministic: bool) -> None:
    small = Shape(
        tokens=21, heads=2, groups=1, width=16, value_width=16, block_len=8, block_stride=4, select_len=8,
        select_count=3, window=9,
    )  # fmt: skip
    all_at_once(Problem(small, torch.float16, "cpu"), deterministic=deterministic)


@needs_gpu
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.tokens >= 900], ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
def test_all_at_once_on_a_gpu(shape: Shape, dtype: torch.dtype, deterministic: bool) -> None:
    all_at_once(Problem(shape, dtype, "cuda"), deterministic=deterministic)


@pytest.mark.parametrize("branch", ["compressed", "selected", "sliding"])
def test_the_comparison_runs_in_the_interpreter(branch: str) -> None:
    small = Shape(
        tokens=33, heads=4, groups=2, width=16, value_width=16, block_len=8, block_stride=4, select_len=8,
        select_count=4, window=9,
    )  # fmt: skip
    assert_at_most_twice_the_error_of_plain_torch(Problem(small, torch.float16, "cpu"), branch)


def test_the_comparison_notices_a_value_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Shape(tokens=20, heads=2, groups=1, width=16, value_width=16, block_len=8, block_stride=4, window=9)
    problem = Problem(small, torch.float16, "cpu")
    right = Problem.results

    def off(self: Problem, backend: Backend, branch: str, dtype: torch.dtype) -> list[Tensor]:
        results = right(self, backend, branch, dtype)
        return [result * (1.01 if backend.name == "triton" else 1) for result in results]

    monkeypatch.setattr(Problem, "results", off)
    with pytest.raises(AssertionError, match="sliding output"):
        assert_at_most_twice_the_error_of_plain_torch(problem, "sliding")


@needs_gpu
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("branch", ["compressed", "selected", "sliding"])
def test_on_a_gpu(branch: str, shape: Shape, dtype: torch.dtype) -> None:
    assert_at_most_twice_the_error_of_plain_torch(Problem(shape, dtype, "cuda"), branch)


@needs_gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("branch", ["compressed", "selected", "sliding"])
def test_at_64k_tokens(branch: str) -> None:
    """Offsets beyond 2^31 elements need more heads than the float64 truth has memory for: see the next test."""
    shape = replace(LARGE, tokens=65536, heads=4, groups=1, width=128, value_width=128)
    assert_at_most_twice_the_error_of_plain_torch(Problem(shape, torch.bfloat16, "cuda"), branch)


@needs_gpu
@pytest.mark.timeout(1800)
def test_elements_beyond_two_to_the_31_are_read_and_written() -> None:
    """132 heads x 131072 tokens x 128: the last heads lie beyond. They must be what they are by themselves."""
    shape = replace(LARGE, tokens=131072, heads=132, groups=132, width=128, value_width=128)
    q, k, v = (torch.randn(1, 132, shape.tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    fused, _ = implementation_for(Implementation.TRITON, q, k, v)
    whole, _ = fused.attend_sliding(q, k, v, window=shape.window, scale=0.1)
    alone, _ = fused.attend_sliding(q[:, -1:], k[:, -1:], v[:, -1:], window=shape.window, scale=0.1)
    assert whole.numel() > 2**31
    assert torch.equal(whole[:, -1:], alone)


@needs_gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_same_inputs_give_the_same_bits_on_a_gpu(dtype: torch.dtype) -> None:
    problem = Problem(LARGE, dtype, "cuda")
    fused, _ = implementation_for(Implementation.TRITON, problem.q, problem.k, problem.v)
    for branch in ("compressed", "selected", "sliding"):
        first = problem.results(fused, branch, dtype)
        for _ in range(5):
            for one, other in zip(first, problem.results(fused, branch, dtype), strict=True):
                assert torch.equal(one, other), branch


@needs_gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_chosen_blocks_are_as_important_as_those_of_plain_torch(dtype: torch.dtype) -> None:
    """Two selections are compared by the importance of what they chose: near ties may go either way."""
    problem = Problem(replace(LARGE, tokens=8192), dtype, "cuda")
    fused, _ = implementation_for(Implementation.TRITON, problem.q, problem.k, problem.v)
    shape, scale = problem.shape, problem.selection.scale
    lengths = {"block_len": shape.block_len, "block_stride": shape.block_stride}
    _, lse = fused.attend_compressed(problem.q, problem.k_blocks, problem.v_blocks, **lengths, scale=scale)
    ours = fused.select(problem.q, problem.k_blocks, lse, problem.selection)
    same = (ours.sort(-1).values == problem.indices.sort(-1).values).float().mean()
    assert float(same) > 0.999
    assert torch.equal(ours, fused.select(problem.q, problem.k_blocks, lse, problem.selection))


@needs_gpu
@pytest.mark.parametrize(
    ("implementation", "reason_of", "name"),
    [
        (Implementation.TORCH, torch_flash_reason, "torch_flash"),
        (Implementation.FLASH, flash_reason, "flash_attn"),  # installed in one job of the nightly
    ],
    ids=["torch", "flash_attn"],
)
def test_flash_attention_with_a_window_says_the_same(
    implementation: Implementation, reason_of: Callable[[Tensor, Tensor], str | None], name: str
) -> None:
    problem = Problem(replace(LARGE, tokens=3000), torch.bfloat16, "cuda")
    if reason := reason_of(problem.q, problem.v):
        pytest.skip(reason)
    theirs, used = implementation_for_sliding(implementation, problem.q, problem.k, problem.v)
    assert used.name == name
    output, _ = theirs.attend_sliding(problem.q, problem.k, problem.v, window=512, scale=0.125)
    fused, _ = implementation_for(Implementation.TRITON, problem.q, problem.k, problem.v)
    ours, _ = fused.attend_sliding(problem.q, problem.k, problem.v, window=512, scale=0.125)
    torch.testing.assert_close(ours, output, rtol=2e-2, atol=2e-2)


def model(implementation: Implementation) -> TinyLM:
    torch.manual_seed(0)
    config = replace(CI, layers=2, dim=256, d_k=32, d_v=32, seq_len=512)
    return TinyLM.from_config(config, implementation).cuda()


def step(trained: TinyLM) -> list[Tensor]:
    tokens = torch.randint(256, (2, 512), generator=torch.Generator().manual_seed(1)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = trained(tokens).float().logsumexp(-1).mean()
    loss.backward()
    return [parameter.grad for parameter in trained.parameters()]


@needs_gpu
def test_auto_takes_the_fused_kernels_on_a_gpu() -> None:
    launch.launches.clear()
    step(model(Implementation.AUTO))
    assert launch.launches["selected_forward"] == launch.launches["ranked_blocks"] == 2


@needs_gpu
@pytest.mark.parametrize("way", ["gc", "reentrant", "compiled"])
def test_however_it_runs_on_a_gpu_the_gradients_are_the_same(way: str) -> None:
    plain, other = model(Implementation.TRITON), model(Implementation.TRITON)
    kept = step(plain)
    if way == "compiled":
        compile_layers(other)
    else:
        checkpoint_layers(other, range(2), Recompute.REENTRANT if way == "reentrant" else Recompute.NON_REENTRANT)
    for one, two in zip(kept, step(other), strict=True):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=1e-3 if way == "compiled" else 0.0)


@needs_gpu
def test_the_warm_up_measures_tiles_and_the_next_run_finds_them(tmp_path: Path) -> None:
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cuda"), backend=None)
    autocast: Callable[[], torch.autocast] = lambda: torch.autocast("cuda", torch.bfloat16)  # noqa: E731
    tuning.clear()
    first = warm_up(
        model(Implementation.TRITON), world, batch=2, tokens=512, autocast=autocast, file=tmp_path / "t.json"
    )
    assert "0 tile sizes" not in first
    tuning.clear()
    again = warm_up(
        model(Implementation.TRITON), world, batch=2, tokens=512, autocast=nullcontext, file=tmp_path / "t.json"
    )
    assert json.loads((tmp_path / "t.json").read_text())
    assert "warm-up" in again


def launched(tmp_path: Path, ranks: int, *options: str) -> list[float]:
    """Losses of the training program under torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(ROOT / "nsa" / "nsa_attention"),
    ]
    words = ["--shape", "ci", "--seq-len", "512", "--steps", "5", "--dtype", "bfloat16", "--data", "text", *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "out" / "training.csv").read_text(encoding="utf-8").splitlines()[1:]
    return [float(row.split(",")[1]) for row in rows]


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        pytest.param(1, "nccl", marks=pytest.mark.gpu),
        pytest.param(2, "gloo", marks=pytest.mark.gpu),
        pytest.param(2, "nccl", marks=pytest.mark.multi_gpu),
    ],
)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_training_on_the_fused_kernels_is_training_on_plain_torch(
    tmp_path: Path, ranks: int, backend: str, wrapper: str
) -> None:
    losses = []
    for implementation in ("triton", "eager"):
        place = tmp_path / implementation
        place.mkdir()
        options = (
            "--wrapper",
            wrapper,
            "--backend",
            backend,
            "--device",
            "cuda",
            "--impl",
            implementation,
            "--gc",
            "all",
        )
        losses.append(launched(place, ranks, *options))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
