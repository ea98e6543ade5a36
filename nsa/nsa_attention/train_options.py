"""The options of the training program."""

from __future__ import annotations

from pathlib import Path

from .config import SHAPES, Attention, Compression, Implementation
from .options import Option
from .values import (
    DTYPES,
    MEAN,
    BadShards,
    Data,
    Decay,
    Packing,
    Phase,
    Wrapper,
    branches,
    checkpoint_source,
    checkpointed_layers,
    data_source,
    ddp_switch,
    flash_switch,
    fraction,
    layer_range,
    layer_set,
    named_shape,
    not_negative,
    on_or_off,
    one_branch,
    one_of,
    positive,
    switch,
    tokenizer_source,
    whole,
    word,
)

# For options of the model, the default None means that the named shape determines the value.
OPTIONS = (
    Option(name="shape", parse=named_shape, default=SHAPES["ci"], about="named shape: " + ", ".join(SHAPES)),
    Option(name="layers", parse=whole(1), default=None, about="number of layers"),
    Option(name="seq_len", parse=whole(2), default=None, about="tokens per sequence"),
    Option(name="attention", parse=one_of(Attention), default=None, about="nsa, or a baseline: vanilla, stock"),
    Option(
        name="branch",
        parse=branches,
        default=None,
        about="attention branches: all, one branch, or a sum such as cmp+sel",
        env=(("NSA_FORCE_BRANCH", one_branch),),
    ),
    Option(
        name="compression",
        parse=one_of(Compression),
        default=None,
        about="how a block is compressed into one key: mlp, mean, mean_mlp",
    ),
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
        about="auto, eager, triton (fused kernels), torch or flash (for the sliding branch), per_token (a slow loop"
        " for the selected branch), or dense (all scores in memory)",
        env=(("NSA_USE_FA2", flash_switch),),
    ),
    Option(
        name="dtype", parse=word(*DTYPES), default="auto", about="auto: the shape's dtype on a GPU, float32 on a CPU"
    ),
    Option(name="steps", parse=whole(1), default=1, about="number of optimizer steps, including those before a resume"),
    Option(name="batch", parse=whole(1), default=None, about="sequences per rank and micro-batch"),
    Option(name="accumulate", parse=whole(1), default=1, about="micro-batches per optimizer step"),
    Option(
        name="data",
        parse=data_source,
        default=Data.SYNTHETIC,
        about="synthetic, text, stories, fineweb_edu, hf:PATH[:CONFIG[:SPLIT]], or a file, a directory, a pattern",
        spellings=("--dataset",),
    ),
    Option(
        name="tokenizer",
        parse=tokenizer_source,
        default="bytes",
        about="tokenizer for texts: bytes, a tokenizer.json, or a .tiktoken file such as r50k_base.tiktoken",
    ),
    Option(name="text_field", parse=str, default="text", about="field or column of a record that contains the text"),
    Option(
        name="packing",
        parse=one_of(Packing),
        default=Packing.AUTO,
        about="auto, documents (no attention between documents) or stream (a row is one sequence)",
    ),
    Option(
        name="workers",
        parse=whole(0),
        default=None,
        about="number of prefetching threads (default: 2, or 0 for data in memory)",
    ),
    Option(
        name="bad_shards",
        parse=one_of(BadShards),
        default=BadShards.STOP,
        about="if data cannot be read: stop, or skip and count it",
    ),
    Option(
        name="loss",
        parse=word("cross_entropy", MEAN),
        default="cross_entropy",
        about="cross_entropy of the next token, or the mean of all logits",
    ),
    Option(name="seed", parse=whole(0), default=0, about="seed of weights and data; the data differs per rank"),
    Option(
        name="phase",
        parse=one_of(Phase),
        default=Phase.STEP,
        about="last part of each step that is run: data, forward, backward, or step",
    ),
    Option(
        name="gc",
        parse=checkpointed_layers,
        default=None,
        about="layers with gradient checkpointing: none, all, 0:6 or 2,6",
        env=(("NSA_GC_RANGE", layer_range), ("NSA_GC_LAYERS", layer_set)),
    ),
    Option(
        name="gc_mode",
        parse=word("reentrant", "non_reentrant"),
        default="non_reentrant",
        about="kind of gradient checkpointing: reentrant or non_reentrant",
    ),
    Option(
        name="wrapper",
        parse=one_of(Wrapper),
        default=None,
        about="none, ddp, fsdp, fsdp1, or manual (average gradients without a wrapper)",
    ),
    Option(name="ddp", parse=ddp_switch, default=None, about="1 for --wrapper ddp, 0 for --wrapper none"),
    Option(
        name="static_graph",
        parse=switch,
        default=False,
        about="DDP: the graph is the same in every step",
        env=(("NSA_DDP_STATIC_GRAPH", switch),),
    ),
    Option(
        name="find_unused_parameters",
        parse=switch,
        default=False,
        about="DDP: search for unused parameters in each step",
    ),
    Option(name="bucket_cap_mb", parse=positive, default=25.0, about="DDP: size of a gradient bucket in MiB"),
    Option(
        name="broadcast_buffers", parse=switch, default=True, about="DDP: broadcast buffers from rank 0 in each step"
    ),
    Option(
        name="gradient_as_bucket_view", parse=switch, default=False, about="DDP: gradients are views of the buckets"
    ),
    Option(
        name="comm_hook",
        parse=word("none", "bf16"),
        default="none",
        about="DDP: none, or bf16 to send gradients as bfloat16",
    ),
    Option(
        name="barrier_after_backward",
        parse=switch,
        default=False,
        about="all ranks wait for each other after the backward pass",
    ),
    Option(name="compile", parse=switch, default=False, about="compile the layers with torch.compile"),
    Option(
        name="backend",
        parse=word("auto", "gloo", "nccl"),
        default="auto",
        about="process group backend",
        env=(("TORCH_BACKEND", word("auto", "gloo", "nccl")),),
    ),
    Option(
        name="device", parse=word("auto", "cpu", "cuda"), default="auto", about="device to train on: auto, cpu or cuda"
    ),
    Option(
        name="trace_grads",
        parse=switch,
        default=False,
        about="print which gradients arrived and which are missing",
        env=(("NSA_TRACE_GRADS", switch),),
    ),
    Option(
        name="trace_module_bwd",
        parse=switch,
        default=False,
        about="print which modules the backward pass reaches",
        env=(("NSA_TRACE_MODULE_BWD", switch),),
    ),
    Option(
        name="trace_buckets",
        parse=switch,
        default=False,
        about="print which DDP buckets are reduced in the first two steps",
        env=(("NSA_TRACE_DDP_BUCKETS", switch),),
    ),
    Option(
        name="mem_dump_every",
        parse=whole(0),
        default=0,
        about="write a memory dump every N steps; 0: never",
        env=(("NSA_MEM_DUMP_EVERY", whole(0)),),
    ),
    Option(
        name="profile_memory",
        parse=switch,
        default=False,
        about="write a table of the operators that allocated most memory in the second step",
    ),
    Option(
        name="mem_snapshot",
        parse=switch,
        default=False,
        about="CUDA: record all allocations with stack traces; written with each memory dump and at the end",
    ),
    Option(
        name="detect_anomaly",
        parse=switch,
        default=False,
        about="autograd's anomaly detection: a NaN in the backward pass is an error that names the forward operation",
    ),
    Option(
        name="step_cost",
        parse=switch,
        default=False,
        about="count the bytes that the first forward pass saves for its backward pass",
    ),
    Option(name="telemetry", parse=on_or_off, default=True, about="on, or off to write no telemetry files"),
    Option(
        name="tensorboard",
        parse=switch,
        default=False,
        about="write event files for TensorBoard, which must be installed",
    ),
    Option(
        name="learning_rate", parse=positive, default=1e-3, about="highest learning rate of the schedule, for AdamW"
    ),
    Option(
        name="warmup_steps",
        parse=whole(0),
        default=0,
        about="number of steps over which the learning rate rises from 0",
    ),
    Option(
        name="lr_decay",
        parse=one_of(Decay),
        default=Decay.NONE,
        about="how the learning rate falls from the warm-up to --decay-steps: none, cosine or linear",
    ),
    Option(name="decay_steps", parse=whole(0), default=0, about="step at which the learning rate reaches --min-lr"),
    Option(name="min_lr", parse=not_negative, default=0.0, about="learning rate after the decay"),
    Option(name="weight_decay", parse=not_negative, default=0.01, about="weight decay of AdamW, for every parameter"),
    Option(name="beta1", parse=fraction, default=0.9, about="beta1 of AdamW"),
    Option(name="beta2", parse=fraction, default=0.999, about="beta2 of AdamW"),
    Option(name="clip", parse=not_negative, default=1.0, about="maximum joint norm of all gradients; 0: no clipping"),
    Option(name="eval_every", parse=whole(0), default=0, about="evaluate every N steps; 0: never"),
    Option(name="eval_data", parse=data_source, default=None, about="held-out data, written as for --data"),
    Option(name="eval_batches", parse=whole(1), default=8, about="number of batches per rank in an evaluation"),
    Option(
        name="log_every", parse=whole(1), default=1, about="print a line every N steps; the files contain every step"
    ),
    Option(name="freeze", parse=str, default=None, about="pattern of the parameters to freeze, such as *.gate_mlp.*"),
    Option(name="checkpoint_every", parse=whole(0), default=0, about="write a checkpoint every N steps; 0: never"),
    Option(name="keep_last", parse=whole(0), default=0, about="number of latest checkpoints to keep; 0: all"),
    Option(
        name="async_checkpoint",
        parse=switch,
        default=False,
        about="write checkpoints in the background, during training",
    ),
    Option(
        name="resume",
        parse=checkpoint_source,
        default=None,
        about="resume from a checkpoint, or from the latest complete one in a directory; auto: in the output "
        "directory, if it has one",
    ),
    Option(
        name="out_dir",
        parse=Path,
        default=Path("out"),
        about="output directory",
        env=(("NSA_OUT_DIR", Path),),
    ),
)
