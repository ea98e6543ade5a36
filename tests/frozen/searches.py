"""Simulated bisections: which probes each of them asks for, in which order, and what it answers.

    python tests/frozen/freeze.py searches

A line of searches.jsonl has the question, the program that is searched, the numbers of rounds and probes, a digest of
all rounds with their answers, and the final answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from nsa_harness.core.search.plan import find_smallest_difference
from nsa_harness.core.search.question import (
    OutOfBudget,
    ProbeResult,
    QuestionKind,
    Round,
    SearchAnswer,
    SearchQuestion,
    Subset,
    spans_of,
)

SEARCHES = Path(__file__).resolve().parent / "searches.jsonl"
GOOD, BAD = ProbeResult.GOOD, ProbeResult.BAD
_KINDS = (QuestionKind.SET, QuestionKind.RANGE, QuestionKind.ORDERED, QuestionKind.CHOICE)

Program = Callable[[Subset], ProbeResult]


def searches() -> str:
    """One line for each search."""
    found = ({"search": name, **_searched(question, program)} for name, question, program in _cases())
    return "".join(f"{json.dumps(one, ensure_ascii=False, separators=(',', ':'))}\n" for one in found)


def _searched(question: SearchQuestion, program: Program) -> dict[str, Any]:
    rounds: list[list[Any]] = []

    def probe(asked: Round) -> Sequence[ProbeResult]:
        answers = [program(subset) for subset in asked.subsets]
        subsets = [spans_of(subset) for subset in asked.subsets]
        rounds.append([[one.value for one in asked.purposes], subsets, asked.open, asked.probes_left, answers])
        if question.max_probes is not None and sum(len(one[1]) for one in rounds) > 3 * question.max_probes:
            raise OutOfBudget("the simulated budget ended")
        return answers

    answer = find_smallest_difference(question, probe)
    return {
        "rounds": len(rounds),
        "probes": sum(len(one[1]) for one in rounds),
        "digest": hashlib.sha256(json.dumps(rounds).encode()).hexdigest()[:12],
        **_answer_values(answer),
    }


def _answer_values(answer: SearchAnswer) -> dict[str, Any]:
    """The fields of the answer that say anything, sets as spans."""
    values = {
        "kind": answer.kind,
        "items": answer.items,
        "groups": answer.groups,
        "confidence": answer.confidence,
        "p_bad": answer.p_bad,
        "why": answer.why,
        "open": answer.open,
        "known": answer.known,
        "passing": answer.passing,
        "failing": answer.failing,
        "zones": answer.zones,
    }
    plain = {key: _plain(value) for key, value in values.items()}
    return {key: value for key, value in plain.items() if value not in (None, [], "")}


def _plain(value: Any) -> Any:
    match value:
        case frozenset():
            return spans_of(value) or "nothing"
        case tuple():
            return [_plain(one) for one in value]
        case float():
            return round(value, 9)
        case str() | int() | None:
            return value
    return [value.start, value.stop, value.counts_as.value]  # a zone


def _cases() -> Iterator[tuple[str, SearchQuestion, Program]]:
    for kind in _KINDS:
        for items in (1, 2, 3, 5, 8, 13, 40):
            for at_once in (1, 3):
                for name, program in _programs(kind, items):
                    question = SearchQuestion(kind=kind, items=items, at_once=at_once)
                    yield f"{kind.value} {items} at once {at_once}: {name}", question, program
        yield from _flaky_cases(kind)
        yield from _other_cases(kind)


def _programs(kind: QuestionKind, items: int) -> Iterator[tuple[str, Program]]:
    """Programs that fail by rule."""
    middle, last = items // 2, items - 1
    yield "never fails", lambda _: GOOD
    yield f"needs {middle}", _needs({middle})
    if items > 2 and kind is not QuestionKind.ORDERED:
        yield f"needs 1 or {last}", _needs({1}, {last})
    if items > 2 and kind in (QuestionKind.SET, QuestionKind.RANGE):
        yield f"needs 0 and {last}", _needs({0, last})
        yield f"needs {middle - 1} and {middle}", _needs({middle - 1, middle})
        yield f"{middle + 1} of them", lambda subset: BAD if len(subset) > middle else GOOD
    if items > 4 and kind is not QuestionKind.CHOICE:
        yield f"needs {last}, unjudged or different in between", _blurred(_needs({last}), items)
        yield "answers by chance, the same each time", _arbitrary(items)


def _flaky_cases(kind: QuestionKind) -> Iterator[tuple[str, SearchQuestion, Program]]:
    for items, seed in ((3, 1), (3, 2), (8, 3), (8, 4), (8, 5), (13, 6)):
        for rate, false_bad in ((0.9, 0.0), (0.5, 0.0), (0.7, 0.1)):
            for known in (False, True):
                question = SearchQuestion(kind=kind, items=items, flaky=known, max_probes=400)
                program = _sometimes(_needs({items // 2}), rate, false_bad, seed)
                name = f"needs {items // 2} in {rate} of runs, else fails in {false_bad}, seed {seed}"
                yield f"{kind.value} {items}{' known to be flaky' * known}: {name}", question, program


def _other_cases(kind: QuestionKind) -> Iterator[tuple[str, SearchQuestion, Program]]:
    """One search for each other field of a question."""
    changes: list[dict[str, Any]] = [
        {"bad_cost": lambda: 5.0},
        {"confidence": 0.99},
        {"repeat": 3},
        {"baseline": 3},
        {"controls": 5},
        {"max_probes": 400, "confidence": 0.8},
    ]
    if kind is QuestionKind.SET:
        changes.append({"together": (frozenset({0, 1}), frozenset({5, 6, 7}))})
    if kind is QuestionKind.ORDERED:
        changes.append({"unbounded": True})
    for change in changes:
        question = SearchQuestion(kind=kind, items=12, **change)
        shown = {key: value() if callable(value) else _plain(value) for key, value in change.items()}
        yield f"{kind.value} 12 {json.dumps(shown)}: needs 7", question, _needs({7})
    for budget in (1, 3, 6, 10):
        budgeted = _with_budget(_needs({7}), budget)
        yield f"{kind.value} 12, {budget} probes: needs 7", SearchQuestion(kind=kind, items=12), budgeted


def _needs(*culprits: set[int]) -> Program:
    """Fails where all of one of the culprits is on."""
    return lambda subset: BAD if any(culprit <= subset for culprit in culprits) else GOOD


def _blurred(program: Program, items: int) -> Program:
    """Says nothing for some sizes of a set, and another failure for others."""
    unclear = {items // 2: ProbeResult.UNRESOLVED, items // 3: ProbeResult.DIFFERENT}
    return lambda subset: unclear.get(len(subset), program(subset))


def _arbitrary(items: int) -> Program:
    def program(subset: Subset) -> ProbeResult:
        if len(subset) in (0, items):
            return BAD if subset else GOOD
        return Random(f"{sorted(subset)}").choice((GOOD, BAD))

    return program


def _sometimes(program: Program, rate: float, false_bad: float, seed: int) -> Program:
    random = Random(seed)
    return lambda subset: BAD if random.random() < (rate if program(subset) is BAD else false_bad) else GOOD


def _with_budget(program: Program, probes: int) -> Program:
    left = [probes]

    def limited(subset: Subset) -> ProbeResult:
        if not left[0]:
            raise OutOfBudget(f"the budget of {probes} probes ended")
        left[0] -= 1
        return program(subset)

    return limited
