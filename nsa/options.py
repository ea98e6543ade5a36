"""What can be set for a training run: every option with its type, its environment name and its words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.config import SHAPES, Attention, Compression, Implementation
from nsa.values import (
    DTYPES,
    Data,
    Phase,
    Wrapper,
    branches,
    checkpointed_layers,
    data_source,
    ddp_switch,
    existing_file,
    flash_switch,
    layer_range,
    layer_set,
    named_shape,
    one_branch,
    one_of,
    positive,
    switch,
    whole,
    word,
)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One setting. `parse` is applied to the text of the command line, the environment or the file alike."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    about: str
    env: tuple[tuple[str, Callable[[str], Any]], ...] = ()
    spellings: tuple[str, ...] = field(default=())

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return self.parse is switch


# None as default means: what the shape says.
OPTIONS = (
    Option(name="shape", parse=named_shape, default=SHAPES["ci"], about="named shape: " + ", ".join(SHAPES)),
    Option(name="layers", parse=whole(1), default=None, about="number of layers"),
    Option(name="seq_len", parse=whole(2), default=None, about="tokens of a sequence"),
    Option(name="attention", parse=one_of(Attention), default=None, about="nsa, or a control: vanilla, stock"),
    Option(
        name="branch",
        parse=branches,
        default=None,
        about="all, one branch, or a sum such as cmp+sel",
        env=(("NSA_FORCE_BRANCH", one_branch),),
    ),
    Option(name="compression", parse=one_of(Compression), default=None, about="how a block becomes one key: mean, mlp"),
    Option(
        name="stop_gradient_gates",
        parse=switch,
        default=None,
        about="no gradient through the gates; their parameters are frozen",
    ),
    Option(
        name="impl",
        parse=one_of(Implementation),
        default=Implementation.AUTO,
        about="auto, eager, triton (our fused kernels), or torch or flash for the sliding branch",
        env=(("NSA_USE_FA2", flash_switch),),
    ),
    Option(name="dtype", parse=word(*DTYPES), default="auto", about="auto: the shape's on a GPU, float32 on a CPU"),
    Option(name="steps", parse=whole(1), default=1, about="optimizer steps"),
    Option(name="batch", parse=whole(1), default=None, about="sequences per rank and micro-batch"),
    Option(name="accumulate", parse=whole(1), default=1, about="micro-batches per optimizer step"),
    Option(
        name="data",
        parse=data_source,
        default=Data.SYNTHETIC,
        about="synthetic, text, or a file of bytes",
        spellings=("--dataset",),
    ),
    Option(name="seed", parse=whole(0), default=0, about="seed of weights and data; the data differs per rank"),
    Option(name="phase", parse=one_of(Phase), default=Phase.STEP, about="how far a step goes"),
    Option(
        name="gc",
        parse=checkpointed_layers,
        default=None,
        about="checkpointed layers: none, all, 0:6 or 2,6",
        env=(("NSA_GC_RANGE", layer_range), ("NSA_GC_LAYERS", layer_set)),
    ),
    Option(
        name="gc_mode",
        parse=word("reentrant", "non_reentrant"),
        default="non_reentrant",
        about="how a checkpointed layer runs again",
    ),
    Option(name="wrapper", parse=one_of(Wrapper), default=None, about="none, ddp, fsdp, fsdp1 or manual averaging"),
    Option(name="ddp", parse=ddp_switch, default=None, about="1 and 0 for --wrapper ddp and none"),
    Option(
        name="static_graph",
        parse=switch,
        default=False,
        about="DDP: the graph is the same in every step",
        env=(("NSA_DDP_STATIC_GRAPH", switch),),
    ),
    Option(name="find_unused_parameters", parse=switch, default=False, about="DDP: look for unused parameters"),
    Option(name="bucket_cap_mb", parse=positive, default=25.0, about="DDP: size of a gradient bucket"),
    Option(name="broadcast_buffers", parse=switch, default=True, about="DDP: send buffers from rank 0 each step"),
    Option(name="gradient_as_bucket_view", parse=switch, default=False, about="DDP: gradients live in the buckets"),
    Option(
        name="comm_hook", parse=word("none", "bf16"), default="none", about="DDP: bf16: gradients travel as bfloat16"
    ),
    Option(
        name="barrier_after_backward",
        parse=switch,
        default=False,
        about="all ranks wait for each other after the backward pass",
    ),
    Option(name="compile", parse=switch, default=False, about="torch.compile for the layers"),
    Option(
        name="backend",
        parse=word("auto", "gloo", "nccl"),
        default="auto",
        about="process group backend",
        env=(("TORCH_BACKEND", word("auto", "gloo", "nccl")),),
    ),
    Option(name="device", parse=word("auto", "cpu", "cuda"), default="auto", about="where tensors live"),
    Option(
        name="trace_grads",
        parse=switch,
        default=False,
        about="say which gradients arrived and which are missing",
        env=(("NSA_TRACE_GRADS", switch),),
    ),
    Option(
        name="trace_module_bwd",
        parse=switch,
        default=False,
        about="say which modules the backward pass reaches",
        env=(("NSA_TRACE_MODULE_BWD", switch),),
    ),
    Option(
        name="trace_buckets",
        parse=switch,
        default=False,
        about="say which DDP buckets are reduced in the first two steps",
        env=(("NSA_TRACE_DDP_BUCKETS", switch),),
    ),
    Option(
        name="mem_dump_every",
        parse=whole(0),
        default=0,
        about="write a memory dump every so many steps; 0: never",
        env=(("NSA_MEM_DUMP_EVERY", whole(0)),),
    ),
    Option(
        name="profile_memory",
        parse=switch,
        default=False,
        about="write which operators took most memory in the second step",
    ),
    Option(
        name="detect_anomaly",
        parse=switch,
        default=False,
        about="autograd's anomaly detection: a NaN in backward is an error that names the forward call",
    ),
    Option(name="learning_rate", parse=positive, default=1e-3, about="of AdamW"),
    Option(name="clip", parse=positive, default=1.0, about="largest norm of all gradients together"),
    Option(name="freeze", parse=str, default=None, about="parameters to freeze, a pattern such as *.gate_mlp.*"),
    Option(
        name="checkpoint_every", parse=whole(0), default=0, about="write a checkpoint every so many steps; 0: never"
    ),
    Option(name="resume", parse=existing_file, default=None, about="checkpoint to go on from"),
    Option(
        name="out_dir",
        parse=Path,
        default=Path("out"),
        about="where telemetry goes",
        env=(("NSA_OUT_DIR", Path),),
    ),
)

CONFIG_ENV = "CONFIG"


def parser() -> argparse.ArgumentParser:
    """Every option as text; absent ones are None, so that other sources can fill them."""
    result = argparse.ArgumentParser(prog="python -m nsa.train", description="Train a small NSA language model.")
    result.add_argument("--config", default=None, help="YAML file of options; the command line wins over it")
    for option in OPTIONS:
        about = option.about + "".join(f"; environment: {name}" for name, _ in option.env)
        if option.is_switch:
            result.add_argument(option.flag, default=None, action=argparse.BooleanOptionalAction, help=about)
        else:
            result.add_argument(option.flag, *option.spellings, dest=option.name, default=None, help=about)
    return result
