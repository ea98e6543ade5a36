"""Build the complete command line for nsa.train. A test compares the sizes in this module with nsa.config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nsa_harness.core.scenario.scenario import Attention, Loss, Scenario
from nsa_harness.core.search.subject import Subject, SubjectForm
from nsa_harness.errors import UsageError
from nsa_harness.texts.words import noun_for


@dataclass(frozen=True, kw_only=True)
class Shape:
    vocab: int
    layers: int
    dim: int
    seq_len: int
    batch: int
    dtype: str


SHAPES = {
    "ci": Shape(vocab=256, layers=4, dim=128, seq_len=256, batch=2, dtype="float32"),
    "minimal": Shape(vocab=256, layers=2, dim=768, seq_len=512, batch=2, dtype="bfloat16"),
    "repro": Shape(vocab=256, layers=5, dim=128, seq_len=128, batch=1, dtype="float32"),
    "showcase": Shape(vocab=256, layers=1, dim=128, seq_len=128, batch=8, dtype="float32"),
    "shake": Shape(vocab=50257, layers=12, dim=768, seq_len=1024, batch=1, dtype="bfloat16"),
    "production": Shape(vocab=50257, layers=12, dim=768, seq_len=2048, batch=2, dtype="bfloat16"),
}
DTYPE_WORDS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


@dataclass(frozen=True, kw_only=True)
class MachineChoice:
    """The values that replace the `auto` settings of a scenario on this machine."""

    shape: str
    layers: int
    seq_len: int
    steps: int
    batch: int
    dtype: str
    backend: str
    device: str


# If the first key differs between two scenarios, the others only have a meaning together with it.
DEPENDENT_KEYS = (
    "model.attention", "model.branch", "model.compression", "model.impl", "model.stop_gradient_gates",
)  # fmt: skip


def branch_subject(scenario: Scenario) -> Subject:
    """Return a bisection subject that searches for a faulty attention branch."""
    if not scenario.is_ours or scenario.model.attention is not Attention.NSA:
        raise UsageError("--branch: only nsa.train with model.attention: nsa has branches")
    branch = scenario.model.branch
    return Subject(
        form=SubjectForm.PARTS,
        key="model.branch",
        noun="branch",
        items=("cmp", "sel", "win") if branch == "all" else tuple(branch.split("+")),
        good={"model.attention": "vanilla", "model.branch": "all"},
        bad_values=("all",),
    )


def nsa_options(scenario: Scenario, choice: MachineChoice) -> tuple[str, ...]:
    """Return the command-line arguments of nsa.train for a scenario."""
    model, train, gc, parallel, trace = (scenario.model, scenario.train, scenario.gc, scenario.parallel, scenario.trace)
    options: dict[str, str | int | float | bool | None] = {
        "shape": choice.shape,
        "layers": choice.layers,
        "seq-len": choice.seq_len,
        "attention": model.attention.value,
        "branch": model.branch,
        "compression": model.compression.value if model.compression else None,
        "stop-gradient-gates": model.stop_gradient_gates,
        "compile": model.compile,
        "impl": model.impl.value,
        "dtype": choice.dtype,
        "steps": choice.steps,
        "batch": choice.batch,
        "accumulate": train.accumulate,
        "data": train.data,
        "loss": None if train.loss is Loss.CROSS_ENTROPY else train.loss.value,
        "seed": train.seed,
        "phase": train.phase.value,
        "learning-rate": train.learning_rate,
        "clip": train.clip,
        "freeze": train.freeze,
        "checkpoint-every": train.checkpoint_every,
        "keep-last": train.keep_last,
        "async-checkpoint": train.async_checkpoint,
        "resume": train.resume,
        "gc": gc.layers,
        "gc-mode": gc.mode.value,
        "wrapper": parallel.wrapper.value,
        "static-graph": parallel.static_graph,
        "find-unused-parameters": parallel.find_unused_parameters,
        "broadcast-buffers": parallel.broadcast_buffers,
        "gradient-as-bucket-view": parallel.gradient_as_bucket_view,
        "bucket-cap-mb": parallel.bucket_cap_mb,
        "comm-hook": parallel.comm_hook.value,
        "barrier-after-backward": parallel.barrier_after_backward,
        "backend": choice.backend,
        "device": choice.device,
        "trace-grads": trace.grads,
        "trace-module-bwd": trace.module_bwd,
        "trace-buckets": trace.buckets,
        "mem-dump-every": trace.mem_dump_every,
        "profile-memory": trace.profile_memory,
        "detect-anomaly": trace.detect_anomaly,
        "step-cost": trace.step_cost,
        "mem-snapshot": trace.mem_snapshot,
        "telemetry": "on" if trace.telemetry else "off",
        "tensorboard": trace.tensorboard,
    }
    return tuple(word for name, value in options.items() for word in _option(name, value))


def subject_line(scenario: Scenario, choice: MachineChoice) -> str:
    """Return a one-line description of the model, such as `shape ci (4 layers, dim 128, T 256, fp32)`."""
    shape = SHAPES[choice.shape]
    dtype = DTYPE_WORDS[choice.dtype]
    line = f"shape {choice.shape} ({choice.layers} layers, dim {shape.dim}, T {choice.seq_len}, {dtype})"
    return ", ".join((line, *_differences(scenario)))


def layers_text(choice: str) -> str:
    """Return a readable description of a choice of layers, such as "layers 0-3 [0:4]" for "0:4"."""
    if choice == "all":
        return "all layers"
    if ":" in choice:
        start, stop = (int(part) for part in choice.split(":"))
        return f"layers {start}-{stop - 1} [{choice}]" if stop - start > 1 else f"layer {start} [{choice}]"
    return f"{noun_for(choice.count(',') + 1, 'layer')} {choice}"


def _differences(scenario: Scenario) -> Iterator[str]:
    if scenario.model.attention is not Attention.NSA:
        yield f"{scenario.model.attention} attention"
    elif scenario.model.branch != "all":
        yield f"branch {scenario.model.branch} only"
    if scenario.gc.layers != "none":
        mode = scenario.gc.mode.value.replace("_", "-")
        yield f"gradient checkpointing in {layers_text(scenario.gc.layers)}, {mode}"


def _option(name: str, value: str | int | float | bool | None) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, bool):
        return (f"--{name}" if value else f"--no-{name}",)
    return (f"--{name}", str(value))
