"""The playbook of nsa.train: what people blame, what was agreed to do, and the decision tree of the plan.

And what a second run of it can do otherwise through its own command line, and what follows from how that ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nsa_harness.core.comparison.contrasts import (
    Factor,
    is_evidence,
    one_of,
    other_than,
    passed,
    setting,
    steady_contrasts,
)
from nsa_harness.core.comparison.decisions import (
    NCCL_ONLY,
    READY_TWICE,
    SLOW,
    UNSTABLE,
    Gate,
    GateAnswer,
    Playbook,
    TreeQuestion,
    again,
    applies,
    both,
    breaks,
    cures,
    does_not_apply,
    failed,
    gloo_too,
    named,
    not_checkable,
    one_process,
)
from nsa_harness.core.comparison.deepening import ANOMALY, FOLLOWS, PASSED, SAME, Change, Follows
from nsa_harness.core.comparison.hypotheses import (
    ENVIRONMENT_HYPOTHESES,
    NCCL_HYPOTHESIS,
    Hypothesis,
    HypothesisKind,
    besides_default,
    rising,
    swap,
    switch,
    takes_our_keys,
)
from nsa_harness.core.diagnosis.causes import SecondRun
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Outcome
from nsa_harness.subject.files import is_launched_by

BRANCHES = ("cmp", "sel", "win")


def branch(name: str) -> Factor:
    """The changed run has this branch more than its control, or each of the two has one branch alone."""
    others = [other for other in BRANCHES if other != name]
    return Factor(
        keys=("model.branch",),
        without=lambda value: name not in _open(value),
        with_it=lambda value: name in _open(value),
        related=lambda control, changed: (
            _open(changed) - _open(control) == {name}
            and (_open(control) < _open(changed) or len(_open(control)) == len(_open(changed)) == 1)
        ),
        undo=(f"model.branch={'+'.join(others)}",),
        values=("+".join(others), "all"),
    )


def _open(value: str) -> frozenset[str]:
    return frozenset(BRANCHES if value == "all" else value.split("+"))


STATIC_GRAPH = switch("parallel.static_graph", "true", off="false")
ATTENTION = swap("model.attention", ("vanilla", "stock"), ("nsa",))
LAYER_COUNT = rising("model.layers", ("4", "12"))
FSDP_FOR_DDP = swap("parallel.wrapper", ("ddp",), ("fsdp", "fsdp1"))
_ALONE = Factor(keys=("model.branch",), without=one_of(*BRANCHES), with_it=one_of(*BRANCHES))
_TOGETHER = Factor(keys=("model.branch",), without=one_of(*BRANCHES), with_it=one_of("all"))
_RANGES = Factor(keys=("gc.layers",), without=other_than("none", "all", ""), with_it=other_than("none", "all", ""))
_ALL_LEARN = (("train.freeze", "null"), ("model.branch", "all"), ("model.stop_gradient_gates", "false"))
_RANGE = re.compile(r"([0-9]{1,4}):([0-9]{1,4})")

_SECOND_RANK = Factor(
    keys=("parallel.wrapper", "run.ranks"),
    without=one_of("none"),
    # Gradients averaged by hand: any other wrapper would be blamed with the second rank.
    with_it=one_of("manual"),
    undo=("parallel.wrapper=none", "run.ranks=1"),
)


def _would_miss_gradients(run: Outcome) -> bool:
    """Under DDP, and known to have all gradients, or to make a second step, before which DDP complains."""
    if setting(run, "parallel.wrapper") != "ddp":
        return False
    return not passed(run) or run.missing_gradients == () or setting(run, "train.steps") != "1"


_BLAMED_BY_THE_SEEDS = (
    ("DDP is the cause", swap("parallel.wrapper", ("manual",), ("ddp",))),
    ("more than one rank is the cause", _SECOND_RANK),
    ("gradient checkpointing is the cause", besides_default("gc.layers", "none", "all")),
    ("NSA's attention is the cause", ATTENTION),
    ("the layer count is the cause", LAYER_COUNT),
    ("FSDP is the cause", swap("parallel.wrapper", ("manual",), ("fsdp", "fsdp1"))),
)
_FIND_UNUSED = switch("parallel.find_unused_parameters", "true", off="false")
_CAUSES: tuple[tuple[str, Factor], ...] = (
    ("reentrant gradient checkpointing is the cause", switch("gc.mode", "reentrant", off="non_reentrant")),
    (
        "reentrant gradient checkpointing with find_unused_parameters is the cause",
        Factor(
            keys=("gc.mode", "parallel.find_unused_parameters"),
            without=other_than("reentrant"),
            with_it=one_of("reentrant"),
            undo=("gc.mode=non_reentrant", "parallel.find_unused_parameters=false"),
        ),
    ),
    ("the compressed branch is the cause", branch("cmp")),
    ("the selection branch is the cause", branch("sel")),
    ("the sliding branch is the cause", branch("win")),
    ("the sequence length is the cause", rising("model.seq_len", ("128", "512"))),
    ("bf16 is the cause", swap("model.dtype", ("float32",), ("bfloat16",))),
    ("gradient accumulation with no_sync is the cause", rising("train.accumulate", ("1", "4"))),
)
_CHANGES: tuple[tuple[str, Factor], ...] = (
    ("static_graph changes it", STATIC_GRAPH),
    ("find_unused_parameters changes it", _FIND_UNUSED),
    ("FSDP in place of DDP changes it", FSDP_FOR_DDP),
    (
        "safe mode (eager kernels, stop-gradient gates) changes it",
        Factor(keys=("model.impl", "model.stop_gradient_gates"), without=other_than("eager"), with_it=one_of("eager")),
    ),
    ("eager kernels change it", switch("model.impl", "eager", off="auto")),
    ("stop-gradient gates change it", switch("model.stop_gradient_gates", "true", off="false")),
    ("the bucket size changes it", besides_default("parallel.bucket_cap_mb", "25.0", "2")),
    ("no buffer broadcast changes it", switch("parallel.broadcast_buffers", "false", off="true")),
    ("gradient_as_bucket_view changes it", switch("parallel.gradient_as_bucket_view", "true", off="false")),
    ("a communication hook changes it", besides_default("parallel.comm_hook", "none", "bf16")),
    ("a barrier after backward changes it", switch("parallel.barrier_after_backward", "true", off="false")),
)


def _hypotheses() -> Iterator[Hypothesis]:
    """What the seeds named has a row of its own, also where no run tests it."""
    for text, factor in _BLAMED_BY_THE_SEEDS:
        yield Hypothesis(text=text, kind=HypothesisKind.CAUSE, factor=factor, prominent=True)
    yield Hypothesis(
        text="find_unused_parameters is needed",
        kind=HypothesisKind.NEED,
        factor=_FIND_UNUSED,
        prominent=True,
        concerns=_would_miss_gradients,
    )
    yield NCCL_HYPOTHESIS
    yield from (Hypothesis(text=text, kind=HypothesisKind.CAUSE, factor=factor) for text, factor in _CAUSES)
    yield from (Hypothesis(text=text, kind=HypothesisKind.CHANGE, factor=factor) for text, factor in _CHANGES)
    yield from ENVIRONMENT_HYPOTHESES


def _single_branch(outcomes: Sequence[Outcome]) -> GateAnswer:
    found = steady_contrasts(_ALONE, outcomes)
    guilty = [pair for pair in found if passed(pair.control) and failed(pair.changed)]
    if guilty:
        return applies(both(guilty), again(guilty[0].changed, "parallel.wrapper=none", "run.ranks=1"))
    return (
        does_not_apply(both(found))
        if found
        else not_checkable("missing: two runs with one branch each, model.branch=sel")
    )


def _branches_together(outcomes: Sequence[Outcome]) -> GateAnswer:
    found = steady_contrasts(_TOGETHER, outcomes)
    for whole in (pair.changed for pair in found):
        alone = [pair.control for pair in found if pair.changed == whole]
        if {setting(run, "model.branch") for run in alone} != set(BRANCHES):
            continue
        told = named([*alone, whole])
        if failed(whole) and all(map(passed, alone)):
            return applies(told, again(whole, "model.branch=cmp+sel"))
        return does_not_apply(told)
    return not_checkable("missing: each branch alone and all together, otherwise alike")


def _missing_gradients(outcomes: Sequence[Outcome]) -> GateAnswer:
    traced = list(_traced(outcomes))
    short = [run for run in traced if run.missing_gradients]
    if not traced:
        return not_checkable("missing: a run with trace.grads=true whose backward was finished")
    if not short:
        return does_not_apply(f"no parameter without gradient: {named(traced)}")
    names = sorted(set.intersection(*(set(run.missing_gradients or ()) for run in short)))
    if not names:
        return does_not_apply(f"not the same parameters in {named(short)}")
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return applies(f"{shown} in {named(short)}", again(short[0], "parallel.find_unused_parameters=true"))


def _traced(outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    """A frozen parameter or a branch that is switched off gets no gradient on purpose."""
    for run in outcomes:
        on_purpose = any(setting(run, key) != value for key, value in _ALL_LEARN)
        if is_evidence(run) and run.missing_gradients is not None and not on_purpose:
            yield run


def _checkpointed_layers(outcomes: Sequence[Outcome]) -> GateAnswer:
    found = steady_contrasts(_RANGES, outcomes)
    guilty = [pair for pair in found if passed(pair.control) and failed(pair.changed)]
    if guilty:
        worst = guilty[0].changed
        chosen = setting(worst, "gc.layers")
        return applies(f"{both(guilty[:1])} · {layers_text(chosen)}", again(worst, f"gc.layers={_first_half(chosen)}"))
    return (
        does_not_apply(both(found))
        if found
        else not_checkable("missing: two runs with different ranges, gc.layers=0:6")
    )


def layers_text(chosen: str) -> str:
    """ "layers 0-5 [0:6]": inclusive for people, then as it is written."""
    span = _RANGE.fullmatch(chosen)
    return f"layers {span[1]}-{int(span[2]) - 1} [{chosen}]" if span else f"layers {chosen}"


def _first_half(chosen: str) -> str:
    if span := _RANGE.fullmatch(chosen):
        start, stop = int(span[1]), int(span[2])
        return f"{start}:{max(start + 1, (start + stop) // 2)}"
    layers = chosen.split(",")
    return f"[{','.join(layers[: max(1, len(layers) // 2)])}]"


_FSDP_CURES = cures(FSDP_FOR_DDP, "the same run under DDP and under FSDP", "train.steps=200")


def _fsdp(outcomes: Sequence[Outcome]) -> GateAnswer:
    return _FSDP_CURES([run for run in outcomes if setting(run, "train.accumulate") == "1"])


_GATES: tuple[Gate, ...] = (
    UNSTABLE,
    SLOW,
    Gate(
        name="static_graph",
        when="plain DDP fails and static_graph passes",
        then="static_graph is a mitigation, if every step touches every parameter: run 100 steps",
        rule=cures(STATIC_GRAPH, "the same run with and without parallel.static_graph=true", "train.steps=100"),
    ),
    Gate(
        name="single_branch",
        when="a single branch fails where another one passes",
        then="the fault lies in that branch's backward: run it in one process",
        rule=_single_branch,
    ),
    Gate(
        name="branches_together",
        when="each branch alone passes and all together fail",
        then="the fault lies in the gates or in the sum of the branches: run them in pairs",
        rule=_branches_together,
    ),
    Gate(
        name="missing_gradients",
        when="the same parameters get no gradient in every run",
        then="the fault lies in the module that owns them: look for in-place or conditional operations",
        rule=_missing_gradients,
    ),
    gloo_too("parallel.wrapper=manual"),
    NCCL_ONLY,
    READY_TWICE,
    Gate(
        name="checkpointed_layers",
        when="gradient checkpointing fails in one range of layers and passes in another",
        then="the fault lies in those layers: halve the range",
        rule=_checkpointed_layers,
    ),
    one_process(("run.ranks=1", "parallel.wrapper=none"), "model.attention=vanilla"),
    Gate(
        name="attention",
        when="plain attention passes and NSA's fails",
        then="the fault lies in NSA's attention: open its branches one by one",
        rule=breaks(ATTENTION, "the same run with model.attention=vanilla", "model.branch=win"),
    ),
    Gate(
        name="depth",
        when="fewer layers pass and more fail",
        then="look between the two: time each depth (-t sweep)",
        rule=breaks(LAYER_COUNT, "two runs that differ in model.layers alone"),
    ),
    Gate(
        name="fsdp",
        when="DDP fails without accumulation and FSDP passes",
        then="train under FSDP: 200 steps first",
        rule=_fsdp,
    ),
)
_TREE: tuple[TreeQuestion, ...] = (
    TreeQuestion(
        gate="static_graph",
        text="Does it pass with a static graph?",
        leaf="enable static_graph in production",
        fits=lambda run: setting(run, "parallel.wrapper") == "ddp",
        changes=("--matrix", "parallel.static_graph=false,true"),
    ),
    TreeQuestion(
        gate="single_branch",
        text="Does a single branch fail?",
        leaf="fix that branch's backward",
        fits=lambda run: setting(run, "model.attention") == "nsa",
        changes=("--matrix", "model.branch=cmp,sel,win"),
    ),
    TreeQuestion(
        gate="missing_gradients",
        text="Are the same parameters without gradient each time?",
        leaf="fix the in-place operations in the module that owns them",
        fits=takes_our_keys,
        changes=("trace.grads=true",),
    ),
    TreeQuestion(
        gate="gloo_too",
        text="Does it fail over gloo too?",
        leaf="it is a fault of the autograd graph",
        fits=lambda run: run.ranks > 1,
        changes=("needs.backend=gloo",),
        or_else=("nccl_only", "it is a fault of NCCL's transport"),
    ),
)

PLAYBOOK = Playbook(hypotheses=tuple(_hypotheses()), gates=_GATES, questions=_TREE, onward="nsa-harness run -t plan")


_VANILLA = "vanilla"
WHAT_FOLLOWS: Follows = {
    **FOLLOWS,
    (_VANILLA, PASSED): "so the fault lies in NSA's attention",
    (_VANILLA, SAME): "so it does not need NSA's attention",
}


def second_runs(spec: RunSpec) -> tuple[Change, ...]:
    """None of another program's launch."""
    if not is_launched_by(spec):
        return ()
    words = spec.program
    switched = tuple("--detect-anomaly" if word == "--no-detect-anomaly" else word for word in words)
    anomaly = Change(name=ANOMALY.name, says=ANOMALY.says, program=switched, setting=("trace.detect_anomaly", "true"))
    gloo = Change(
        name=SecondRun.OTHER_BACKEND,
        says="gloo in place of nccl",
        program=_with(words, "--backend", "nccl", "gloo"),
        backend="gloo",
        setting=("needs.backend", "gloo"),
    )
    every_branch = _with(words, "--branch", "all", "") != words
    vanilla = Change(
        name=_VANILLA,
        says="vanilla attention",
        program=_with(words, "--attention", "nsa", "vanilla") if every_branch else words,
        setting=("model.attention", "vanilla"),
    )
    return anomaly, gloo, vanilla


def _with(words: tuple[str, ...], option: str, old: str, new: str) -> tuple[str, ...]:
    """The command line with another value of that option, where it has this one."""
    pairs = zip(("", *words), words, strict=False)
    return tuple(new if (before, word) == (option, old) else word for before, word in pairs)
