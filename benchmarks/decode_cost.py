"""Compute the cost of decoding a token with a paged cache, without a GPU.

    python benchmarks/decode_cost.py                    1 and 32 sequences of 8k and 64k tokens, for sm_90
    python benchmarks/decode_cost.py --arch 80 90       for an A100 as well

Prints a line of JSON for each kernel, for each length and number of sequences, and for each kind of cache. Each kernel
is compiled with its first candidate tile, and its machine code is analysed (benchmarks/sass.py). Bytes are the
unavoidable memory traffic of one layer. Host work is that of one layer, computed as the difference between two layers
and one: torch operations that compute or copy, and kernel launches. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402

from benchmarks.compiled import Launch, compile_launch, read_compiled, without_kernels  # noqa: E402
from benchmarks.host_cost import OperationCounter, force_triton_on_cpu  # noqa: E402
from benchmarks.kernel_model import code_row  # noqa: E402
from benchmarks.roofline import Shape  # noqa: E402
from nsa_attention.config import ALL_BRANCHES, CI, Implementation  # noqa: E402
from nsa_attention.decode import new_caches, step  # noqa: E402
from nsa_attention.model import TinyLM  # noqa: E402
from nsa_attention.ops import mixing, rotary  # noqa: E402
from nsa_attention.ops.cached_attention import CachedAttentionConfig, CachedRows, Kind  # noqa: E402
from nsa_attention.ops.fused.cached import attend_pages  # noqa: E402
from nsa_attention.ops.selection import Selection  # noqa: E402

TOKENS = (8192, 65536)
SEQUENCES = (1, 32)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Print the cost of decoding a token from a paged cache, without a GPU."
    )
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=(80, 90, 100))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tried", type=int, default=1, help="number of candidate tiles per kernel")
    options = parser.parse_args(arguments)
    shape = Shape(
        tokens=TOKENS[-1],
        heads=options.heads,
        groups=options.groups,
        width=options.width,
        value_width=options.width,
    )
    for row in kernel_rows(shape, options.arch, getattr(torch, options.dtype), options.tried):
        print(json.dumps(row), flush=True)
    for tokens in TOKENS:
        for sequences in SEQUENCES:
            row = {"tokens": tokens, "sequences": sequences, **layer_bytes(replace(shape, tokens=tokens), sequences)}
            print(json.dumps(row))
    for name, row in host_rows().items():
        print(json.dumps({"host": name, **row}))
    return 0


def kernel_rows(
    shape: Shape, architectures: list[int], dtype: torch.dtype = torch.bfloat16, tiles_per_kernel: int = 1
) -> Iterator[dict[str, Any]]:
    """Yield, for each decoding kernel, the properties of its machine code."""
    for architecture in architectures:
        for launch in paged_launches(shape, 1, dtype, tiles_per_kernel, architecture):
            result = compile_launch(launch, architecture)
            yield {
                "kernel": launch.name,
                "sm": architecture,
                "warps": launch.warps,
                "stages": launch.stages,
                "programs": launch.programs,
                "copies_of_16_bytes": result.asm["ptx"].count("cp.async.cg.shared.global"),
                "tensor_core_operations": result.asm["ptx"].count("mma"),
                **code_row(read_compiled(result), launch.stages, architecture),
            }


def paged_launches(
    shape: Shape, sequences: int, dtype: torch.dtype = torch.bfloat16, tiles_per_kernel: int = 1, capability: int = 90
) -> list[Launch]:
    """Return the kernel launches made in one layer to decode one token per sequence.

    The tensors are uninitialized, so they take no physical memory.
    """
    page_len = shape.select_len
    columns = -(-shape.tokens // page_len)
    pages = shape.groups, page_len, shape.width
    keys = torch.empty(3 * columns, *pages, dtype=dtype)
    values = torch.empty(3 * columns, *pages[:2], shape.value_width, dtype=dtype)
    rows = CachedRows(
        memory=dict.fromkeys(Kind, (keys, values)),
        tables=torch.zeros(sequences, 3, columns, dtype=torch.int32),
        lengths=torch.full((sequences,), shape.tokens, dtype=torch.int32),
        longest=shape.tokens,
    )
    q = torch.empty(1, shape.heads, sequences, shape.width, dtype=dtype)
    gates = torch.empty(3, sequences, 1, shape.heads, dtype=dtype).permute(0, 2, 3, 1)
    with without_kernels(tiles_per_kernel=tiles_per_kernel, capability=capability) as noted_launches:
        attend_pages(q, gates, rows, _attention_config(shape))
    return list(noted_launches)


def _attention_config(shape: Shape) -> CachedAttentionConfig:
    selection = Selection(
        block_len=shape.block_len,
        block_stride=shape.block_stride,
        select_len=shape.select_len,
        select_count=shape.select_count,
        scale=shape.width**-0.5,
    )
    return CachedAttentionConfig(selection=selection, window=shape.window, branches=ALL_BRANCHES)


def layer_bytes(shape: Shape, sequences: int, size: int = 2) -> dict[str, Any]:
    """Return the memory traffic, in MB, caused by one layer in one decoding step."""
    row = sequences * shape.groups * (shape.width + shape.value_width) * size
    first, _ = paged_launches(shape, sequences)
    scores, partial = (first.argument(name).numel() * 4 for name in ("p_scores", "p_partial"))
    byte_counts = {
        "compressed": shape.blocks * row,
        "selected": shape.select_count * shape.select_len * row,
        "sliding": shape.window * row,
        "scores, written and read": 2 * scores,
        "parts, written and read": 2 * partial,
        "dense attention": shape.tokens * row,
    }
    return {"programs": first.programs, "mb": {name: round(count / 1e6, 3) for name, count in byte_counts.items()}}


def host_rows() -> dict[str, dict[str, int]]:
    """Return, for each kind of cache, the number of torch operations and kernel launches per layer."""
    variants = {
        "one memory, plain torch": (Implementation.EAGER, None),
        "pages, plain torch": (Implementation.EAGER, 64),
        "pages, fused": (Implementation.TRITON, 64),
    }
    return {
        name: {
            kind: two_layers - one_layer
            for (kind, one_layer), two_layers in zip(with_one_layer.items(), with_two_layers.values(), strict=True)
        }
        for name, (implementation, pages) in variants.items()
        for with_one_layer, with_two_layers in [[_host_work(layers, implementation, pages) for layers in (1, 2)]]
    }


def _host_work(layers: int, implementation: Implementation, pages: int | None) -> dict[str, int]:
    """Count the torch operations and kernel launches in one decoding step."""
    config = replace(CI, layers=layers)
    model = TinyLM.from_config(config, implementation)
    caches = new_caches(model, 2, pages=pages)
    with torch.no_grad(), without_kernels() as noted_launches, force_triton_on_cpu(), _like_on_a_gpu():
        for tokens in (40, 1):
            step(model, torch.zeros(2, tokens, dtype=torch.long), caches)
        noted_launches.clear()
        with OperationCounter() as operations:
            step(model, torch.zeros(2, 1, dtype=torch.long), caches)
    return {"operations": sum(operations.counts.values()), "launches": len(noted_launches)}


@contextmanager
def _like_on_a_gpu() -> Iterator[None]:
    """Within the `with` block, use the GPU code path for CPU tensors."""
    originals = [(module, module.is_eager_on_cpu) for module in (rotary, mixing)]
    for module, _ in originals:
        module.is_eager_on_cpu = lambda *_: False
    try:
        yield
    finally:
        for module, function in originals:
            module.is_eager_on_cpu = function


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
