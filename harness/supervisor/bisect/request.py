"""BisectRequest: what a `bisect` command asks for, once its subject is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa_harness.core.bisect.question import Question as SearchQuestion
from nsa_harness.core.bisect.question import QuestionKind
from nsa_harness.core.bisect.signature import Wanted
from nsa_harness.core.bisect.subject import Subject
from nsa_harness.core.report import MachineFacts
from nsa_harness.supervisor.bisect.journal import question_key
from nsa_harness.supervisor.bisect.launches import CannotLaunch, Launches, Templates
from nsa_harness.supervisor.launch.planning import Invocation

_MOST_PROBES = 1000  # a search that takes more has lost its way


@dataclass(frozen=True, kw_only=True)
class BisectRequest:
    question: Invocation  # with the scenario, or the script
    subject: Subject
    templates: Templates
    base_args: tuple[str, ...]  # of the scenario's program, before what the templates add
    wanted: Wanted
    confidence: float
    repeat: int  # how often each proof is run
    jobs: int  # probes at the same time
    budget_s: float | None  # for all probes together
    fork: bool  # probes without torchrun where that is safe; the first `repeat` runs of a proof never
    out: Path | None
    json: bool
    probe: str
    command: str  # as typed


def question_of(request: BisectRequest) -> SearchQuestion:
    subject = request.subject
    return SearchQuestion(
        kind=QuestionKind.ORDERED if subject.ordered else QuestionKind.SET,
        items=len(subject.items),
        together=tuple(map(frozenset, subject.together)),
        at_once=request.jobs,
        confidence=request.confidence,
        repeat=request.repeat,
        unbounded=subject.open_end,
        max_probes=_MOST_PROBES,
    )


def launches_of(request: BisectRequest, facts: MachineFacts) -> Launches:
    return Launches(
        question=request.question,
        subject=request.subject,
        templates=request.templates,
        base_args=request.base_args,
        facts=facts,
    )


def key_of(request: BisectRequest, launches: Launches) -> str:
    """The same command about the same program on the same packages is the same question."""
    ends = [_hash_or_reason(launches, subset) for subset in ((), range(len(request.subject.items)))]
    return question_key(
        request.subject, request.templates, request.question.words, request.question.script, ends, request.wanted,
        request.confidence, request.repeat, request.jobs, request.fork, request.probe,
    )  # fmt: skip


def _hash_or_reason(launches: Launches, subset: Sequence[int]) -> str:
    try:
        return launches.spec(subset).spec_hash
    except CannotLaunch as why:
        return str(why)
