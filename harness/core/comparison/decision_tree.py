"""The decision tree of the plan, walked over the runs: each question, which run answered it, and where that leads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nsa_harness.core.comparison.comparison import override_command, takes_our_keys
from nsa_harness.core.comparison.configuration import setting
from nsa_harness.core.comparison.decisions import Answer, State, decided, failed
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.report import Outcome

_CERTAIN = 0.9


class Said(StrEnum):
    YES = "yes"
    NO = "no"
    OPEN = "open"  # no run answers it
    NOT_ASKED = "not asked"  # the path has ended before


@dataclass(frozen=True, kw_only=True)
class Question:
    gate: str  # whose rule answers it
    text: str
    leaf: str  # where a yes leads
    fits: Callable[[Outcome], bool]  # a failed run that can be asked again
    changes: tuple[str, ...]  # what makes the missing runs out of it


@dataclass(frozen=True, kw_only=True)
class Step:
    question: Question
    said: Said
    answer: Answer
    command: str | None  # of an open question: what answers it


@dataclass(frozen=True, kw_only=True)
class Walk:
    steps: tuple[Step, ...]
    leaf: str | None  # None where every answered question was answered no, and that leads nowhere
    certain_already: tuple[str, ...]  # causes that a rule names with certainty: those need no tree

    @property
    def open(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.said is Said.OPEN)


TREE: tuple[Question, ...] = (
    Question(
        gate="static_graph",
        text="Does it pass with a static graph?",
        leaf="enable static_graph in production",
        fits=lambda run: setting(run, "parallel.wrapper") == "ddp",
        changes=("--matrix", "parallel.static_graph=false,true"),
    ),
    Question(
        gate="single_branch",
        text="Does a single branch fail?",
        leaf="fix that branch's backward",
        fits=lambda run: setting(run, "model.attention") == "nsa",
        changes=("--matrix", "model.branch=cmp,sel,win"),
    ),
    Question(
        gate="missing_gradients",
        text="Are the same parameters without gradient each time?",
        leaf="fix the in-place operations in the module that owns them",
        fits=takes_our_keys,
        changes=("trace.grads=true",),
    ),
    Question(
        gate="gloo_too",
        text="Does it fail over gloo too?",
        leaf="it is a fault of the autograd graph",
        fits=lambda run: run.ranks > 1,
        changes=("needs.backend=gloo",),
    ),
)
NCCL_LEAF = "it is a fault of NCCL's transport"


def walked(outcomes: Sequence[Outcome]) -> Walk | None:
    """None where no run of nsa.train failed unannounced: then there is nothing to ask."""
    counting = [one for one in outcomes if one.final]
    bad = sorted((one for one in counting if failed(one) and takes_our_keys(one)), key=_plainest)
    if not bad:
        return None
    answers = {one.gate.name: one.answer for one in decided(counting)}
    steps: list[Step] = []
    leaf: str | None = None
    for question in TREE:
        said = Said.NOT_ASKED if leaf else _said(answers[question.gate])
        command = _command(question, bad) if said is Said.OPEN else None
        steps.append(Step(question=question, said=said, answer=answers[question.gate], command=command))
        leaf = question.leaf if said is Said.YES else leaf
    if leaf is None and steps[-1].said is Said.NO and answers["nccl_only"].state is State.APPLIES:
        leaf = NCCL_LEAF
    return Walk(steps=tuple(steps), leaf=leaf, certain_already=_certain(bad))


def _said(answer: Answer) -> Said:
    return {State.APPLIES: Said.YES, State.DOES_NOT_APPLY: Said.NO, State.NOT_CHECKABLE: Said.OPEN}[answer.state]


def _command(question: Question, bad: Sequence[Outcome]) -> str | None:
    asked = next(filter(question.fits, bad), None)
    return override_command(asked.scenario, *question.changes) if asked else None


def _certain(bad: Sequence[Outcome]) -> tuple[str, ...]:
    """Empty unless all of them are explained."""
    sure = [one for one in bad if one.findings[:1] and one.findings[0].confidence >= _CERTAIN]
    causes = {one.verdict.cause for one in sure if one.verdict.cause not in (None, Cause.UNKNOWN, Cause.EXCEPTION)}
    return tuple(sorted(filter(None, causes))) if len(sure) == len(bad) else ()


def _plainest(outcome: Outcome) -> tuple[object, ...]:
    return len(outcome.settings), outcome.scenario, outcome.attempt, outcome.spec_hash, outcome.dir
