"""Claims: what people blame or hope for, each with the one setting that two runs must differ in to tell."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from nsa_harness.core.comparison.configuration import Contrast, is_number, one_of, other_than


class Kind(StrEnum):
    CAUSE = "cause"  # without it a run passes, with it it does not
    CHANGE = "change"  # with and without it, one run passes and the other does not


@dataclass(frozen=True, kw_only=True)
class Claim:
    text: str
    kind: Kind
    contrast: Contrast


BRANCHES = ("cmp", "sel", "win")


def switch(key: str, on: str, *, off: str = "") -> Contrast:
    undo = (f"{key}={off}",) if off else ()
    return Contrast(keys=(key,), without=other_than(on), with_it=one_of(on), undo=undo)


def swap(key: str, control: tuple[str, ...], changed: tuple[str, ...], *, typed: str | None = None) -> Contrast:
    """`typed`: the key as the command line knows it."""
    undo = (f"{typed or key}={control[0]}",)
    return Contrast(keys=(key,), without=one_of(*control), with_it=one_of(*changed), undo=undo)


def rising(key: str) -> Contrast:
    return Contrast(
        keys=(key,),
        without=is_number,
        with_it=is_number,
        related=lambda control, changed: float(control) < float(changed),
    )


def branch(name: str) -> Contrast:
    """The changed run has this branch more than its control, or each of the two has one branch alone."""
    others = [other for other in BRANCHES if other != name]
    return Contrast(
        keys=("model.branch",),
        without=lambda value: name not in _open(value),
        with_it=lambda value: name in _open(value),
        related=lambda control, changed: (
            _open(changed) - _open(control) == {name}
            and (_open(control) < _open(changed) or len(_open(control)) == len(_open(changed)) == 1)
        ),
        undo=(f"model.branch={'+'.join(others)}",),
    )


def _open(value: str) -> frozenset[str]:
    return frozenset(BRANCHES if value == "all" else value.split("+"))


STATIC_GRAPH = switch("parallel.static_graph", "true", off="false")
NCCL = replace(
    swap("backend", ("gloo",), ("nccl",), typed="needs.backend"), besides=("run.env.NCCL_", "run.env.TORCH_NCCL_")
)
ATTENTION = swap("model.attention", ("vanilla", "stock"), ("nsa",))
LAYER_COUNT = rising("model.layers")
FSDP_FOR_DDP = swap("parallel.wrapper", ("ddp",), ("fsdp", "fsdp1"))
ONE_PROCESS = Contrast(
    keys=("parallel.wrapper", "run.ranks"),
    without=one_of("none"),
    with_it=other_than("none"),
    undo=("parallel.wrapper=none", "run.ranks=1"),
)
CHECKPOINTING = Contrast(
    keys=("gc.layers",), without=one_of("none"), with_it=other_than("none"), undo=("gc.layers=none",)
)
REENTRANT_AND_UNUSED = Contrast(
    keys=("gc.mode", "parallel.find_unused_parameters"),
    without=other_than("reentrant"),
    with_it=one_of("reentrant"),
    undo=("gc.mode=non_reentrant", "parallel.find_unused_parameters=false"),
)
SAFE_MODE = Contrast(
    keys=("model.impl", "model.stop_gradient_gates"), without=other_than("eager"), with_it=one_of("eager")
)
_BUCKETS = Contrast(keys=("parallel.bucket_cap_mb",), without=one_of("25.0"), with_it=other_than("25.0"))
_HOOK = Contrast(keys=("parallel.comm_hook",), without=one_of("none"), with_it=other_than("none"))

_CAUSES: tuple[tuple[str, Contrast], ...] = (
    ("DDP is the cause", swap("parallel.wrapper", ("manual",), ("ddp",))),
    ("FSDP is the cause", swap("parallel.wrapper", ("manual",), ("fsdp", "fsdp1"))),
    ("more than one rank is the cause", ONE_PROCESS),
    ("NCCL is the cause", NCCL),
    ("gradient checkpointing is the cause", CHECKPOINTING),
    ("reentrant gradient checkpointing is the cause", switch("gc.mode", "reentrant", off="non_reentrant")),
    ("reentrant gradient checkpointing with find_unused_parameters is the cause", REENTRANT_AND_UNUSED),
    ("NSA's attention is the cause", ATTENTION),
    ("the compressed branch is the cause", branch("cmp")),
    ("the selection branch is the cause", branch("sel")),
    ("the sliding branch is the cause", branch("win")),
    ("the layer count is the cause", LAYER_COUNT),
    ("the sequence length is the cause", rising("model.seq_len")),
    ("bf16 is the cause", swap("model.dtype", ("float32",), ("bfloat16",))),
    ("gradient accumulation with no_sync is the cause", rising("train.accumulate")),
)
_CHANGES: tuple[tuple[str, Contrast], ...] = (
    ("static_graph changes it", STATIC_GRAPH),
    ("find_unused_parameters changes it", switch("parallel.find_unused_parameters", "true", off="false")),
    ("FSDP in place of DDP changes it", FSDP_FOR_DDP),
    ("safe mode (eager kernels, stop-gradient gates) changes it", SAFE_MODE),
    ("eager kernels change it", switch("model.impl", "eager", off="auto")),
    ("stop-gradient gates change it", switch("model.stop_gradient_gates", "true", off="false")),
    ("the bucket size changes it", _BUCKETS),
    ("no buffer broadcast changes it", switch("parallel.broadcast_buffers", "false", off="true")),
    ("gradient_as_bucket_view changes it", switch("parallel.gradient_as_bucket_view", "true", off="false")),
    ("a communication hook changes it", _HOOK),
    ("a barrier after backward changes it", switch("parallel.barrier_after_backward", "true", off="false")),
    ("NCCL_P2P_DISABLE changes it", switch("run.env.NCCL_P2P_DISABLE", "1")),
    ("NCCL_IB_DISABLE changes it", switch("run.env.NCCL_IB_DISABLE", "1")),
    ("CUDA_LAUNCH_BLOCKING changes it", switch("run.env.CUDA_LAUNCH_BLOCKING", "1")),
)
CLAIMS: tuple[Claim, ...] = (
    *(Claim(text=text, kind=Kind.CAUSE, contrast=contrast) for text, contrast in _CAUSES),
    *(Claim(text=text, kind=Kind.CHANGE, contrast=contrast) for text, contrast in _CHANGES),
)
