"""Decisions: the gates in the order of the decision tree, each with what the runs answered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.comparison.claims import ATTENTION, BRANCHES, FSDP_FOR_DDP, LAYER_COUNT, NCCL, STATIC_GRAPH
from nsa_harness.core.comparison.comparison import override_command, silenced, takes_our_keys
from nsa_harness.core.comparison.configuration import (
    Contrast,
    Pair,
    is_evidence,
    is_number,
    one_of,
    other_than,
    pairs,
    passed,
    setting,
)
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.report import Outcome


class State(StrEnum):
    APPLIES = "applies"
    DOES_NOT_APPLY = "does not apply"
    NOT_CHECKABLE = "not checkable"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the runs say to a gate, and the run to make next."""

    state: State
    seen: str  # the runs it rests on; for NOT_CHECKABLE, what is missing
    command: str | None = None


Rule = Callable[[Sequence[Outcome]], Answer]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """If `when`, then `then`: agreed before the run."""

    name: str
    when: str
    then: str
    rule: Rule


def failed(outcome: Outcome) -> bool:
    """A gate asks for failures that nobody announced; an announced one decides nothing new."""
    return is_evidence(outcome) and not passed(outcome) and not outcome.expected


def applies(seen: str, command: str | None = None) -> Answer:
    return Answer(state=State.APPLIES, seen=seen, command=command)


def does_not_apply(seen: str) -> Answer:
    return Answer(state=State.DOES_NOT_APPLY, seen=seen)


def not_checkable(why: str) -> Answer:
    return Answer(state=State.NOT_CHECKABLE, seen=why)


def named(outcomes: Sequence[Outcome]) -> str:
    """ "ddp_onestep HANG, ddp_static_graph PASS": each run once, the first few of them."""
    told = list(dict.fromkeys(f"{one.scenario} {one.verdict.status.value}" for one in outcomes))
    return ", ".join(told[:4]) + (f" and {len(told) - 4} more" if len(told) > 4 else "")


def both(found: Sequence[Pair]) -> str:
    return named([run for pair in found for run in (pair.control, pair.changed)])


def again(outcome: Outcome, *overrides: str) -> str | None:
    """The command for the same run with something changed; a foreign program can only be repeated."""
    return override_command(outcome.scenario, *overrides) if takes_our_keys(outcome) else outcome.repeat


def cures(contrast: Contrast, missing: str, *overrides: str) -> Rule:
    """The control run fails and the changed one passes."""
    return _pair_rule(contrast, missing, overrides, lambda pair: failed(pair.control) and passed(pair.changed))


def breaks(contrast: Contrast, missing: str, *overrides: str) -> Rule:
    """The control run passes and the changed one fails."""
    return _pair_rule(contrast, missing, overrides, lambda pair: passed(pair.control) and failed(pair.changed))


def _pair_rule(contrast: Contrast, missing: str, overrides: Sequence[str], holds: Callable[[Pair], bool]) -> Rule:
    def rule(outcomes: Sequence[Outcome]) -> Answer:
        found = pairs(contrast, outcomes)
        telling = [pair for pair in found if holds(pair)]
        if telling:
            return applies(both(telling[:1]), again(telling[0].changed, *overrides))
        return (
            does_not_apply(both(found))
            if found
            else not_checkable(silenced(contrast, outcomes) or f"missing: {missing}")
        )

    return rule


_ALONE = Contrast(keys=("model.branch",), without=one_of(*BRANCHES), with_it=one_of(*BRANCHES))
_TOGETHER = Contrast(keys=("model.branch",), without=one_of(*BRANCHES), with_it=one_of("all"))
_RANGES = Contrast(keys=("gc.layers",), without=other_than("none", "all", ""), with_it=other_than("none", "all", ""))
_ALL_LEARN = (("train.freeze", "null"), ("model.branch", "all"), ("model.stop_gradient_gates", "false"))
_RANGE = re.compile(r"([0-9]{1,4}):([0-9]{1,4})")
_READY_TWICE = re.compile(r"ready only once|ready twice")


@dataclass(frozen=True, kw_only=True)
class Decision:
    gate: Gate
    answer: Answer


def decided(outcomes: Sequence[Outcome]) -> tuple[Decision, ...]:
    """Every gate with its answer; the first one that applies is what to do now."""
    counting = sorted((one for one in outcomes if one.final), key=_plainest)
    return tuple(Decision(gate=gate, answer=gate.rule(counting)) for gate in GATES)


def fired(decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    return tuple(one for one in decisions if one.answer.state is State.APPLIES)


def _plainest(outcome: Outcome) -> tuple[object, ...]:
    return len(outcome.settings), outcome.scenario, outcome.attempt, outcome.spec_hash, outcome.dir


def _unstable(outcomes: Sequence[Outcome]) -> Answer:
    flaky = [one for one in outcomes if one.flaky]
    if flaky:
        return applies(named(flaky), again(flaky[0], "--repeat=5"))
    return does_not_apply("no attempts disagree")


def _slow(outcomes: Sequence[Outcome]) -> Answer:
    slow = [one for one in outcomes if failed(one) and one.verdict.cause == Cause.SLOW]
    if not slow:
        return does_not_apply("no run was still moving at its deadline")
    deadline = dict(slow[0].criteria).get("limits.deadline_s", "")
    longer = [f"limits.deadline_s={3 * float(deadline):.0f}"] if is_number(deadline) else []
    return applies(named(slow), again(slow[0], *longer))


def _single_branch(outcomes: Sequence[Outcome]) -> Answer:
    found = pairs(_ALONE, outcomes)
    guilty = [pair for pair in found if passed(pair.control) and failed(pair.changed)]
    if guilty:
        return applies(both(guilty), again(guilty[0].changed, "parallel.wrapper=none", "run.ranks=1"))
    return (
        does_not_apply(both(found))
        if found
        else not_checkable("missing: two runs with one branch each, model.branch=sel")
    )


def _branches_together(outcomes: Sequence[Outcome]) -> Answer:
    found = pairs(_TOGETHER, outcomes)
    for whole in (pair.changed for pair in found):
        alone = [pair.control for pair in found if pair.changed == whole]
        if {setting(run, "model.branch") for run in alone} != set(BRANCHES):
            continue
        told = named([*alone, whole])
        if failed(whole) and all(map(passed, alone)):
            return applies(told, again(whole, "model.branch=cmp+sel"))
        return does_not_apply(told)
    return not_checkable("missing: each branch alone and all together, otherwise alike")


def _missing_gradients(outcomes: Sequence[Outcome]) -> Answer:
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


def _gloo_too(outcomes: Sequence[Outcome]) -> Answer:
    over_gloo = [run for run in outcomes if is_evidence(run) and run.backend == "gloo" and run.ranks > 1]
    bad = [run for run in over_gloo if failed(run)]
    if bad:
        return applies(named(bad), again(bad[0], "parallel.wrapper=manual"))
    return (
        does_not_apply(named(over_gloo))
        if over_gloo
        else not_checkable("missing: two ranks over gloo, needs.backend=gloo")
    )


def _checkpointed_layers(outcomes: Sequence[Outcome]) -> Answer:
    found = pairs(_RANGES, outcomes)
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


def _ready_twice(outcomes: Sequence[Outcome]) -> Answer:
    twice = [run for run in outcomes if failed(run) and _says_twice(run)]
    checkpointed = [run for run in twice if _may_checkpoint(run)]
    if checkpointed:
        return applies(named(checkpointed), again(checkpointed[0], "gc.mode=non_reentrant"))
    if twice:
        return does_not_apply(f"{named(twice)}: nothing is checkpointed there, so a module is used twice")
    return does_not_apply("no run says so")


def _may_checkpoint(run: Outcome) -> bool:
    """What a foreign program does, and what a report of an earlier version was set to, is not known."""
    known = takes_our_keys(run) and run.device
    return not known or setting(run, "gc.layers") not in ("none", "")


def _says_twice(run: Outcome) -> bool:
    return run.verdict.cause == Cause.READY_TWICE or _READY_TWICE.search(run.verdict.summary) is not None


def _one_process(outcomes: Sequence[Outcome]) -> Answer:
    alone = [run for run in outcomes if is_evidence(run) and run.ranks == 1]
    bad = [run for run in alone if failed(run)]
    if bad:
        return applies(named(bad), again(bad[0], "model.attention=vanilla"))
    missing = "missing: a run in one process, run.ranks=1 parallel.wrapper=none"
    return does_not_apply(named(alone)) if alone else not_checkable(missing)


_FSDP_CURES = cures(FSDP_FOR_DDP, "the same run under DDP and under FSDP", "train.steps=200")


def _fsdp(outcomes: Sequence[Outcome]) -> Answer:
    return _FSDP_CURES([run for run in outcomes if setting(run, "train.accumulate") == "1"])


GATES: tuple[Gate, ...] = (
    Gate(
        name="unstable",
        when="attempts of one launch disagree",
        then="measure how often, before any row below is believed",
        rule=_unstable,
    ),
    Gate(
        name="slow",
        when="a run still moves at its deadline",
        then="it is slow, not stuck: give it time and profile it",
        rule=_slow,
    ),
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
    Gate(
        name="gloo_too",
        when="a run over gloo fails too",
        then="it is not NCCL: autograd or the graph; take DDP's reducer away next",
        rule=_gloo_too,
    ),
    Gate(
        name="nccl_only",
        when="nccl fails and gloo passes",
        then="it is NCCL's transport: run it without P2P",
        rule=breaks(NCCL, "the same run over gloo and over nccl", "run.env.NCCL_P2P_DISABLE=1"),
    ),
    Gate(
        name="ready_twice",
        when="a parameter is marked ready twice",
        then="reentrant gradient checkpointing under DDP: use the non-reentrant form",
        rule=_ready_twice,
    ),
    Gate(
        name="checkpointed_layers",
        when="gradient checkpointing fails in one range of layers and passes in another",
        then="the fault lies in those layers: halve the range",
        rule=_checkpointed_layers,
    ),
    Gate(
        name="one_process",
        when="a run in one process fails too",
        then="it needs neither DDP nor a second rank: look at the model",
        rule=_one_process,
    ),
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
