"""Hypotheses about failures of nsa.train, and the changes that diagnostic reruns of it can make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nsa_harness.core.comparison.contrasts import Requirement, Variable, has_passed, one_of, other_than, setting
from nsa_harness.core.comparison.decisions import Playbook
from nsa_harness.core.comparison.hypotheses import (
    ENVIRONMENT_HYPOTHESES,
    NCCL_HYPOTHESIS,
    Hypothesis,
    HypothesisKind,
    other_than_default,
    rising,
    swap,
    switch,
)
from nsa_harness.core.diagnosis.causes import SecondRun
from nsa_harness.core.experiment.diagnostic_rerun import ANOMALY, Change
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Outcome
from nsa_harness.subject.files import is_launched_by

BRANCHES = ("cmp", "sel", "win")

# Each of these settings gives a variable below its effect: without it, both runs of a contrast do the same.
_CHECKPOINTED = Requirement(key="gc.layers", allows=other_than("none"), override="gc.layers=all")
_UNDER_DDP = Requirement(key="parallel.wrapper", allows=one_of("ddp"), override="parallel.wrapper=ddp")
_NOT_UNDER_DDP = Requirement(key="parallel.wrapper", allows=other_than("ddp"))
_NSA = Requirement(key="model.attention", allows=one_of("nsa"), override="model.attention=nsa")
_SEVERAL_RANKS = Requirement(key="run.ranks", allows=other_than("1"), override="run.ranks=2")
# Only NSA's attention has branches, implementations and gates, so another attention can replace only the plain one.
_PLAIN_NSA = (
    Requirement(key="model.branch", allows=one_of("all"), override="model.branch=all"),
    Requirement(key="model.impl", allows=one_of("auto"), override="model.impl=auto"),
    Requirement(key="model.stop_gradient_gates", allows=one_of("false"), override="model.stop_gradient_gates=false"),
)
_EVERY_BRANCH = Requirement(
    key="model.impl",
    allows=other_than("torch", "flash", "per_token"),  # these compute a single branch
    override="model.impl=auto",
    only_to_launch=True,
)
_ANY_DEPTH = Requirement(key="gc.layers", allows=one_of("none", "all"), override="gc.layers=none", only_to_launch=True)
_NO_LOSS_SCALING = Requirement(
    key="model.dtype", allows=other_than("float16"), override="model.dtype=bfloat16", only_to_launch=True
)
_NO_HOOK = Requirement(key="parallel.comm_hook", allows=one_of("none"), override="parallel.comm_hook=none")


def _needs(variable: Variable, *requirements: Requirement) -> Variable:
    return replace(variable, requirements=requirements)


def branch(name: str) -> Variable:
    """Return the experiment variable that switches the attention branch `name` on or off.

    The changed run has this branch in addition to those of its control run, or each of the two runs has a single
    branch.
    """
    others = [other for other in BRANCHES if other != name]
    return Variable(
        keys=("model.branch",),
        is_control_value=lambda value: name not in _open(value),
        is_changed_value=lambda value: name in _open(value),
        relation=lambda control, changed: (
            _open(changed) - _open(control) == {name}
            and (_open(control) < _open(changed) or len(_open(control)) == len(_open(changed)) == 1)
        ),
        undo_overrides=(f"model.branch={'+'.join(others)}",),
        example_values=("+".join(others), "all"),
        requirements=(_NSA, _EVERY_BRANCH),
    )


def _open(value: str) -> frozenset[str]:
    return frozenset(BRANCHES if value == "all" else value.split("+"))


STATIC_GRAPH = _needs(switch("parallel.static_graph", "true", off="false"), _UNDER_DDP)
ATTENTION = _needs(swap("model.attention", ("vanilla", "stock"), ("nsa",)), *_PLAIN_NSA)
LAYER_COUNT = _needs(rising("model.layers", ("4", "12")), _ANY_DEPTH)
FSDP_FOR_DDP = _needs(swap("parallel.wrapper", ("ddp",), ("fsdp", "fsdp1")), _NO_HOOK, _NO_LOSS_SCALING)

_SECOND_RANK = Variable(
    keys=("parallel.wrapper", "run.ranks"),
    is_control_value=one_of("none"),
    # Gradients are averaged by hand, because any other wrapper would change together with the second rank.
    is_changed_value=one_of("manual"),
    undo_overrides=("parallel.wrapper=none", "run.ranks=1"),
)


def _would_miss_gradients(run: Outcome) -> bool:
    """Return whether a run uses DDP in such a way that a missing gradient would show in its result."""
    if setting(run, "parallel.wrapper") != "ddp":
        return False
    return not has_passed(run) or run.missing_gradients == () or setting(run, "train.steps") != "1"


_BLAMED_BY_THE_SEEDS = (
    ("DDP is the cause", _needs(swap("parallel.wrapper", ("manual",), ("ddp",)), _NO_HOOK)),
    ("more than one rank is the cause", _SECOND_RANK),
    ("gradient checkpointing is the cause", other_than_default("gc.layers", "none", "all")),
    ("NSA's attention is the cause", ATTENTION),
    ("the layer count is the cause", LAYER_COUNT),
    ("FSDP is the cause", _needs(swap("parallel.wrapper", ("manual",), ("fsdp", "fsdp1")), _NO_HOOK, _NO_LOSS_SCALING)),
)
_FIND_UNUSED = _needs(switch("parallel.find_unused_parameters", "true", off="false"), _UNDER_DDP)
_REENTRANT = switch("gc.mode", "reentrant", off="non_reentrant")
_CAUSES: tuple[tuple[str, Variable], ...] = (
    (
        "reentrant gradient checkpointing under DDP is the cause",
        replace(_REENTRANT, requirements=(_CHECKPOINTED, _UNDER_DDP)),
    ),
    (
        "reentrant gradient checkpointing without DDP is the cause",
        replace(_REENTRANT, requirements=(_CHECKPOINTED, _NOT_UNDER_DDP)),
    ),
    ("the compressed branch is the cause", branch("cmp")),
    ("the selection branch is the cause", branch("sel")),
    ("the sliding branch is the cause", branch("win")),
    ("the sequence length is the cause", rising("model.seq_len", ("128", "512"))),
    ("bf16 is the cause", swap("model.dtype", ("float32",), ("bfloat16",))),
    ("gradient accumulation with no_sync is the cause", _needs(rising("train.accumulate", ("1", "4")), _UNDER_DDP)),
)
_CHANGES: tuple[tuple[str, Variable], ...] = (
    ("static_graph changes it", STATIC_GRAPH),
    ("find_unused_parameters changes it", _FIND_UNUSED),
    ("FSDP in place of DDP changes it", FSDP_FOR_DDP),
    (
        "safe mode (eager kernels, stop-gradient gates) changes it",
        Variable(
            keys=("model.impl", "model.stop_gradient_gates"),
            is_control_value=other_than("eager"),
            is_changed_value=one_of("eager"),
            requirements=(_NSA,),
        ),
    ),
    ("eager kernels change it", _needs(switch("model.impl", "eager", off="auto"), _NSA)),
    (
        "stop-gradient gates change it",
        replace(
            switch("model.stop_gradient_gates", "true", off="false"),
            requirements=(_NSA,),
            command_overrides=("expect.missing_grads=null",),  # the gates then get no gradient, which is no failure
        ),
    ),
    ("the bucket size changes it", _needs(other_than_default("parallel.bucket_cap_mb", "25.0", "2"), _UNDER_DDP)),
    ("no buffer broadcast changes it", _needs(switch("parallel.broadcast_buffers", "false", off="true"), _UNDER_DDP)),
    (
        "gradient_as_bucket_view changes it",
        _needs(switch("parallel.gradient_as_bucket_view", "true", off="false"), _UNDER_DDP),
    ),
    ("a communication hook changes it", _needs(other_than_default("parallel.comm_hook", "none", "bf16"), _UNDER_DDP)),
    (
        "a barrier after backward changes it",
        _needs(switch("parallel.barrier_after_backward", "true", off="false"), _SEVERAL_RANKS),
    ),
)


def _hypotheses() -> Iterator[Hypothesis]:
    """Yield all hypotheses about failures of nsa.train. The project's initial ones are always shown."""
    for text, variable in _BLAMED_BY_THE_SEEDS:
        yield Hypothesis(text=text, kind=HypothesisKind.CAUSE, variable=variable, always_shown=True)
    yield Hypothesis(
        text="find_unused_parameters is needed",
        kind=HypothesisKind.NEED,
        variable=_FIND_UNUSED,
        always_shown=True,
        concerns=_would_miss_gradients,
    )
    yield NCCL_HYPOTHESIS
    yield from (Hypothesis(text=text, kind=HypothesisKind.CAUSE, variable=variable) for text, variable in _CAUSES)
    yield from (Hypothesis(text=text, kind=HypothesisKind.CHANGE, variable=variable) for text, variable in _CHANGES)
    yield from ENVIRONMENT_HYPOTHESES


PLAYBOOK = Playbook(hypotheses=tuple(_hypotheses()), onward="nsa-harness run -t plan")


_VANILLA = "vanilla"


def second_runs(spec: RunSpec) -> tuple[Change, ...]:
    """Return the changes that a diagnostic rerun can make, or () if the program is not nsa.train."""
    if not is_launched_by(spec):
        return ()
    words = spec.program
    anomaly_program = tuple("--detect-anomaly" if word == "--no-detect-anomaly" else word for word in words)
    anomaly = Change(
        name=ANOMALY.name,
        description=ANOMALY.description,
        program=anomaly_program,
        setting=("trace.detect_anomaly", "true"),
    )
    gloo = Change(
        name=SecondRun.OTHER_BACKEND,
        description="gloo in place of nccl",
        program=_with_option(words, "--backend", "nccl", "gloo"),
        backend="gloo",
        setting=("needs.backend", "gloo"),
    )
    every_branch = _with_option(words, "--branch", "all", "") != words
    vanilla = Change(
        name=_VANILLA,
        description="vanilla attention",
        program=_with_option(words, "--attention", "nsa", "vanilla") if every_branch else words,
        setting=("model.attention", "vanilla"),
    )
    return anomaly, gloo, vanilla


def _with_option(words: tuple[str, ...], option: str, old: str, new: str) -> tuple[str, ...]:
    """Return the command line `words` with the value of an option changed from `old` to `new`."""
    pairs = zip(("", *words), words, strict=False)
    return tuple(new if (before, word) == (option, old) else word for before, word in pairs)
