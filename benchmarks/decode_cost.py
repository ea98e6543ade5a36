"""Compute the cost of decoding a token with a paged cache, without a GPU.

    python benchmarks/decode_cost.py                    1 and 32 sequences of 8k and 64k tokens, for sm_90
    python benchmarks/decode_cost.py --arch 80 90       for an A100 as well
    python benchmarks/decode_cost.py --docs             rebuild the tables of docs/internals/nsa/performance.md

Prints a line of JSON for each kernel, for each length and number of sequences, and for each kind of cache. Each kernel
is compiled with its first candidate tile, and its machine code is analysed (benchmarks/sass.py). Bytes are the
unavoidable memory traffic of one layer. Passes are those that the slowest programs make through their loops, one after
the other; each of them waits for memory. Their cycles are simulated (benchmarks/warp_schedule.py). Host work is that of
one layer, computed as the difference between two layers and one: torch operations that compute or copy, and kernel
launches. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402

from benchmarks import sass  # noqa: E402
from benchmarks.compiled import (  # noqa: E402
    CompiledKernel,
    Launch,
    compile_launch,
    disassemble,
    read_compiled,
    without_kernels,
)
from benchmarks.device_model import H200  # noqa: E402
from benchmarks.generated_docs import PAGE, markdown_table, write_page  # noqa: E402
from benchmarks.host_cost import OperationCounter, force_triton_on_cpu  # noqa: E402
from benchmarks.kernel_model import code_row  # noqa: E402
from benchmarks.roofline import Shape  # noqa: E402
from benchmarks.warp_schedule import MULTIPROCESSORS, cycles_per_pass  # noqa: E402
from nsa_attention.config import ALL_BRANCHES, CI, Implementation  # noqa: E402
from nsa_attention.decode import new_caches, step  # noqa: E402
from nsa_attention.model import TinyLM  # noqa: E402
from nsa_attention.ops import mixing, rotary  # noqa: E402
from nsa_attention.ops.cached_attention import CachedAttentionConfig, CachedRows, Kind  # noqa: E402
from nsa_attention.ops.fused import cached  # noqa: E402
from nsa_attention.ops.selection import Selection  # noqa: E402

TOKENS = (8192, 65536)
SEQUENCES = (1, 32)
# Loops of `cached_output` without products: three over partial results, one over scores, two over the sums of parts.
_OTHER_LOOPS = 6
_READS = {
    "sums": "the sums of a part",
    "scores": f"the scores of {cached.CHUNK_SCORES // 16} blocks",
    "keys": "64 keys of a selected block",
    "results": "a partial result",
}
MARKS = ("<!-- decoding: begin -->", "<!-- decoding: end -->")


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
    parser.add_argument("--docs", action="store_true", help=f"only rebuild the tables in {PAGE}")
    options = parser.parse_args(arguments)
    if options.docs:
        shape = Shape(tokens=TOKENS[-1])
        section = docs_section(list(kernel_rows(shape, [80, 90])), _layer_rows(shape), host_rows())
        write_page(REPOSITORY / PAGE, {MARKS: section})
        return 0
    shape = Shape(
        tokens=TOKENS[-1],
        heads=options.heads,
        groups=options.groups,
        width=options.width,
        value_width=options.width,
    )
    for row in kernel_rows(shape, options.arch, getattr(torch, options.dtype), options.tried):
        print(json.dumps(row), flush=True)
    for row in _layer_rows(shape):
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
            code = read_compiled(result)
            yield {
                "kernel": launch.name,
                "sm": architecture,
                "warps": launch.warps,
                "stages": launch.stages,
                "programs": launch.programs,
                "copies_of_16_bytes": result.asm["ptx"].count("cp.async.cg.shared.global"),
                "tensor_core_operations": result.asm["ptx"].count("mma"),
                "around_counter": _around_counter(result.asm["cubin"]),
                "pass_cycles": _pass_cycles(code, architecture),
                **code_row(code, launch.stages, architecture),
            }


def _around_counter(cubin: bytes) -> list[str]:
    """Return the memory and barrier instructions from the last store before the atomic addition to the next load."""
    instructions = sass.parse(disassemble(cubin))
    names = [one.name for one in instructions if one.name in ("LDG", "STG", "BAR", "MEMBAR", "ATOMG", "CCTL")]
    if "ATOMG" not in names:
        return []
    place = names.index("ATOMG")
    first = place - 1 - names[:place][::-1].index("STG")
    return names[first : names.index("LDG", place) + 1]


def _pass_cycles(code: CompiledKernel, architecture: int) -> dict[str, float]:
    """Return the cycles of a pass through each kind of loop, or {} for code that is not recognized."""
    loop = code.loop
    if architecture not in MULTIPROCESSORS or loop is None or not loop.always.mma:
        return {}
    others = sorted(
        (one for one in code.loops if one.is_innermost and one is not loop), key=lambda one: -one.instructions
    )
    kinds = {"keys": loop}
    if len(others) == _OTHER_LOOPS:
        kinds |= {"scores": others[0], "results": others[1], "sums": others[-2]}
    cycles = {name: cycles_per_pass(one.body, code.warps, architecture) for name, one in kinds.items()}
    if "sums" in cycles:
        # The compiler unrolls this loop. The last of the loops takes one part per pass.
        cycles["sums"] /= others[-2].always.global_read_bytes / others[-1].always.global_read_bytes
    return {name: round(number) for name, number in cycles.items()}


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
        cached.attend_pages(q, gates, rows, _attention_config(shape))
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


def _layer_rows(shape: Shape) -> list[dict[str, Any]]:
    return [layer_row(replace(shape, tokens=tokens), sequences) for tokens in TOKENS for sequences in SEQUENCES]


def layer_row(shape: Shape, sequences: int, size: int = 2) -> dict[str, Any]:
    """Return what one layer costs in one decoding step: programs, loop passes, and memory traffic in MB.

    "unshared" is the same for one program per token and group.
    """
    row_bytes = sequences * shape.groups * (shape.width + shape.value_width) * size
    parts, output = launches = paged_launches(shape, sequences)
    with patch.object(cached, "MAX_SHARING_PROGRAMS", 0):
        _, unshared = paged_launches(shape, sequences)
    byte_counts = {
        "compressed": shape.blocks * row_bytes,
        "selected": shape.select_count * shape.select_len * row_bytes,
        "sliding": shape.window * row_bytes,
        "dense attention": shape.tokens * row_bytes,
    }
    return {
        "tokens": shape.tokens,
        "sequences": sequences,
        "launches": len(launches),
        "programs": {parts.name: parts.programs, output.name: output.programs},
        "passes": {
            parts.name: {"keys": -(-parts.argument("rows") // parts.constants["KEYS"])},
            output.name: _passes(output, shape.tokens),
        },
        "mb": _megabytes(byte_counts | _buffer_bytes(output)),
        "unshared": {
            "programs": {output.name: unshared.programs},
            "passes": {output.name: _passes(unshared, shape.tokens)},
            "mb": _megabytes(_buffer_bytes(unshared)),
        },
    }


def _passes(output: Launch, tokens: int) -> dict[str, int]:
    """Return how often the loops of `cached_output` run one after the other, by what a pass reads."""
    constants, shares = output.constants, output.argument("shares")
    places = min(constants["PLACES"], -(-tokens // constants["SELECT_LEN"]))
    pieces = places * -(-constants["SELECT_LEN"] // constants["PIECE"])
    return {
        "sums": output.argument("block_parts"),
        "scores": -(-tokens // (constants["SELECT_LEN"] << constants["LOG_CHUNK"])),
        "keys": -(-pieces // max(1, shares - 1)),
        # The results of the other branches are combined while other programs select blocks.
        "results": output.argument("parts") if shares == 1 else shares,
    }


def _buffer_bytes(output: Launch) -> dict[str, int]:
    """Return the bytes of the scores and partial results that the kernels write and read."""
    constants, shares = output.constants, output.argument("shares")
    scores, partial = (output.argument(name).numel() * 4 for name in ("p_scores", "p_partial"))
    # A score is read once for each selection block that its compressed block overlaps.
    times_read = constants["TAPS"] * constants["BLOCK_STRIDE"] / constants["SELECT_LEN"]
    return {
        "scores, written": scores,
        "scores, read": round(scores * times_read * max(1, shares - 1)),
        "partial results, written and read": 2 * partial,
    }


def _megabytes(byte_counts: dict[str, int]) -> dict[str, float]:
    return {name: round(count / 1e6, 3) for name, count in byte_counts.items()}


def docs_section(
    kernels: Sequence[dict[str, Any]], layers: Sequence[dict[str, Any]], host: dict[str, dict[str, int]]
) -> str:
    """Return the tables of the documentation."""
    cycles = {row["kernel"]: row["pass_cycles"] for row in kernels if row["sm"] == H200.capability}
    layers = [_with_prediction(row, cycles) for row in layers]
    tables = _kernel_table(kernels), _cycle_table(kernels), _layer_table(layers), _host_table(host)
    return "\n\n".join("\n".join(table) for table in tables)


def _with_prediction(row: dict[str, Any], cycles: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return `row` with the predicted time of all passes through the loops of each kernel, in microseconds."""
    times = {
        kernel: 1e6 * sum(count * cycles[kernel][name] for name, count in passes.items()) / H200.clock_hz
        for kernel, passes in row["passes"].items()
    }
    unshared = {"unshared": _with_prediction(row["unshared"], cycles)} if "unshared" in row else {}
    return row | unshared | {"predicted_us": times}


def _kernel_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    names = dict.fromkeys(row["kernel"] for row in rows)
    loops = {"cached_parts": "64 keys of a part", "cached_output": "64 keys of a selected block"}
    head = ["kernel", "loop over"]
    for architecture in dict.fromkeys(row["sm"] for row in rows):
        head += [f"sm_{architecture}: registers", "instructions, loop"]
    head += ["products per iteration", "spilled", "shared memory"]

    def cells(name: str) -> Iterator[str]:
        own = [row for row in rows if row["kernel"] == name]
        yield f"`{name}`"
        yield loops[name]
        for row in own:
            yield str(row["registers"])
            yield f"{row['instructions']}, {row['loop']['instructions']}"
        yield str(sum(own[-1]["loop"]["mma"].values()))
        yield str(max(row["spilled_bytes"] for row in own))
        yield f"{max(row['shared_bytes'] for row in own) / 1024:.0f} KiB"

    return markdown_table(head, map(cells, names))


def _cycle_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    names = {("cached_parts", "keys"): "64 keys of a part"} | {
        ("cached_output", name): text for name, text in _READS.items()
    }
    head = ["cycles of a pass", *(f"sm_{architecture}" for architecture in dict.fromkeys(row["sm"] for row in rows))]
    cells = (
        [f"`{kernel}`: {text}", *(str(row["pass_cycles"][name]) for row in rows if row["kernel"] == kernel)]
        for (kernel, name), text in names.items()
    )
    return markdown_table(head, cells)


def _layer_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    def cells(name: str, *path: str) -> Iterator[str]:
        yield name
        for row in rows:
            value: Any = row
            for key in path:
                value = value[key]
            yield f"{value:.1f}" if isinstance(value, float) else str(value)

    buffers = ("scores, written", "scores, read", "partial results, written and read")
    lines = [cells(f"{name}, MB", "mb", name) for name in rows[0]["mb"] if name not in buffers]
    lines += [
        cells("launches of attention", "launches"),
        cells("programs of `cached_parts`", "programs", "cached_parts"),
        cells("passes over 64 keys of a part", "passes", "cached_parts", "keys"),
        cells("prediction for these passes, microseconds", "predicted_us", "cached_parts"),
    ]
    for path in (("unshared",), ()):
        state = "not shared" if path else "shared"
        lines.append(cells(f"programs of `cached_output`, {state}", *path, "programs", "cached_output"))
        lines += [cells(f"passes over {text}", *path, "passes", "cached_output", name) for name, text in _READS.items()]
        lines.append(cells("prediction for these passes, microseconds", *path, "predicted_us", "cached_output"))
        lines += [cells(f"{name}, MB", *path, "mb", name) for name in buffers]
    head = ["per layer and step", *(f"{row['tokens'] // 1024}k, {row['sequences']} sequences" for row in rows)]
    return markdown_table([one.replace(", 1 sequences", ", 1 sequence") for one in head], lines)


def _host_table(rows: dict[str, dict[str, int]]) -> Iterator[str]:
    lines = ([name, str(row["operations"]), str(row["launches"])] for name, row in rows.items())
    return markdown_table(["cache", "operations", "launches"], lines)


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
