"""Bisections to render: one of each kind of answer, one of 96 layers, and one that attacks its readers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from render_samples import MACHINE, POISON

from nsa_harness.core.experiment.trial import Signature
from nsa_harness.core.report import HangKind, Place
from nsa_harness.core.search.question import (
    CONTROLS,
    PROOFS,
    AnswerKind,
    ProbeResult,
    Purpose,
    SearchAnswer,
    Zone,
    spans_of,
)
from nsa_harness.core.search.report import BisectReport, Commands, ProbeReport
from nsa_harness.core.search.subject import Subject, SubjectForm

GOOD, BAD, DIFFERENT, UNRESOLVED = ProbeResult
PLACE = Place(
    file="nsa/attention.py", line=148, function="select", module="blocks.7.attn.sel", layer=7, text="dist.all_reduce(u)"
)
SOUGHT = Signature(verdict="HANG", cause="rank_conditional_collective", place="attention.py:148")
WHAT = "2 ranks · gloo · shape ci (12 layers, dim 128, T 256, fp32)"


def layers(count: int, start: int = 0) -> Subject:
    return Subject(form=SubjectForm.LAYERS, key="gc.layers", noun="layer", items=tuple(range(start, start + count)))


def probe(
    subject: Subject,
    n: int,
    purpose: Purpose,
    subset: Iterable[int],
    counts_as: ProbeResult,
    **changes: Any,
) -> ProbeReport:
    bad = counts_as is BAD
    told = ProbeReport(
        n=n,
        subset=spans_of(subset),
        purpose=purpose,
        open=(0, len(subject.items)),
        left=0,
        in_full=purpose in PROOFS,
        launcher="torchrun" if purpose in PROOFS else "fork",
        verdict="HANG" if bad else "PASS",
        kind=HangKind.DEADLOCK if bad else None,
        cause="rank_conditional_collective" if bad else None,
        summary="rank 1 never entered all_reduce #14" if bad else "every rank exited 0",
        place=PLACE if bad else None,
        culprits=(1,) if bad else (),
        phase="recomputation in backward" if bad else "exit",
        counts_as=counts_as,
        wall_s=4.2 if bad else 1.2,
        started_s=5.0 * n,
        longest_quiet_s=0.25,
        dir=f"p{n:02}",
        spec_hash=f"{n:04x}",
    )
    return replace(told, **changes)


def controls(subject: Subject) -> list[ProbeReport]:
    every = range(len(subject.items))
    return [
        probe(subject, 1, Purpose.CONTROL_GOOD, (), GOOD),
        probe(subject, 2, Purpose.CONTROL_BAD, every, BAD),
    ]


Asked = tuple[Purpose, Iterable[int], ProbeResult, tuple[int, int]]


def search(subject: Subject, asked: Sequence[Asked]) -> tuple[ProbeReport, ...]:
    """The two controls, and what was asked after them."""
    probes = controls(subject)
    for n, (purpose, subset, counts_as, open_) in enumerate(asked, start=3):
        left = max(0, (open_[1] - open_[0] - 1).bit_length() - 1)
        probes.append(probe(subject, n, purpose, subset, counts_as, open=open_, left=left))
    return tuple(probes)


def bisection(subject: Subject, probes: Sequence[ProbeReport], answer: SearchAnswer, **changes: Any) -> BisectReport:
    found = [one for one in probes if one.purpose not in PROOFS and one.purpose not in CONTROLS]
    told = BisectReport(
        run_id="20261121T101500-3f2a",
        harness="0.1.0",
        machine=MACHINE,
        command="nsa-harness bisect --gc-range",
        scenario="gc_baseline_full",
        what=WHAT,
        subject=subject,
        signature=SOUGHT,
        answer=answer,
        probes=tuple(probes),
        commands=Commands(
            bad=_command(subject, answer.failing),
            good=_command(subject, answer.passing),
            alone=None if answer.failing is None else "cd reports/latest/repro && torchrun --nproc-per-node=2 repro.py",
        ),
        floor_probes=4,
        search_probes=len(found),
        wall_s=sum(one.wall_s for one in probes),
        interrupted=False,
        notes=("CPU form, chosen because this machine has no GPU",),
        not_covered=("nccl", "bf16"),
    )
    return replace(told, **changes)


def _command(subject: Subject, subset: Iterable[int] | None) -> str | None:
    return (
        None if subset is None else f"nsa-harness run gc_baseline_full {' '.join(subject.overrides(frozenset(subset)))}"
    )


def _all_but(count: int, *places: int) -> frozenset[int]:
    return frozenset(range(count)) - frozenset(places)


R, L, A = Purpose.RIGHT_EDGE, Purpose.LEFT_EDGE, Purpose.ALONE
END, START = Purpose.RECHECK_GOOD, Purpose.RECHECK_BAD
TWELVE = layers(12)
SINGLE = bisection(
    TWELVE,
    search(
        TWELVE,
        (
            (R, range(6), GOOD, (0, 12)),
            (R, range(9), BAD, (6, 12)),
            (R, range(7), GOOD, (6, 9)),
            (R, range(8), BAD, (7, 9)),
            (A, {7}, BAD, (0, 8)),
            (Purpose.PROOF_BAD, {7}, BAD, (7, 8)),
            (Purpose.PROOF_BAD, {7}, BAD, (7, 8)),
            (Purpose.PROOF_GOOD, _all_but(12, 7), GOOD, (7, 8)),
            (END, (), GOOD, (0, 12)),
            (START, range(12), BAD, (0, 12)),
        ),
    ),
    SearchAnswer(kind=AnswerKind.SINGLE, items=(7,), passing=_all_but(12, 7), failing=frozenset({7})),
)
RANGE = bisection(
    TWELVE,
    search(
        TWELVE,
        (
            (R, range(6), GOOD, (0, 12)),
            (R, range(9), BAD, (6, 12)),
            (R, range(8), GOOD, (7, 9)),
            (A, {8}, GOOD, (0, 9)),
            (L, range(4, 9), BAD, (0, 8)),
            (L, range(6, 9), GOOD, (4, 8)),
            (L, range(5, 9), GOOD, (4, 6)),
            (Purpose.ENDS_ONLY, {4, 8}, GOOD, (4, 9)),
            (Purpose.WITHOUT_MIDDLE, {4, 5, 8}, GOOD, (4, 9)),
            *((Purpose.DROP_ONE, set(range(4, 9)) - {gone}, GOOD, (4, 9)) for gone in range(4, 9)),
            (Purpose.PROOF_BAD, range(4, 9), BAD, (4, 9)),
            (Purpose.PROOF_GOOD, _all_but(12, *range(4, 9)), GOOD, (4, 9)),
        ),
    ),
    SearchAnswer(
        kind=AnswerKind.RANGE,
        items=(4, 9),
        passing=_all_but(12, *range(4, 9)),
        failing=frozenset(range(4, 9)),
    ),
)
SET = bisection(
    TWELVE,
    search(
        TWELVE,
        (
            (R, range(6), GOOD, (0, 12)),
            (R, range(9), BAD, (6, 12)),
            (A, {8}, GOOD, (0, 9)),
            (Purpose.ENDS_ONLY, {3, 8}, BAD, (3, 9)),
            (Purpose.REDUCE, {3}, GOOD, (3, 9)),
            (Purpose.DROP_ONE, {8}, GOOD, (3, 9)),
            (Purpose.PROOF_BAD, {3, 8}, BAD, (3, 9)),
            (Purpose.PROOF_GOOD, _all_but(12, 3, 8), GOOD, (3, 9)),
        ),
    ),
    SearchAnswer(kind=AnswerKind.SET, items=(3, 8), passing=_all_but(12, 3, 8), failing=frozenset({3, 8})),
)
SEVERAL = bisection(
    TWELVE,
    search(
        TWELVE,
        (
            (R, range(3), BAD, (0, 12)),
            (A, {2}, BAD, (0, 3)),
            (R, {*range(2), *range(3, 10)}, BAD, (3, 12)),
            (A, {9}, BAD, (3, 10)),
            (Purpose.PROOF_GOOD, _all_but(12, 2, 9), GOOD, (0, 12)),
        ),
    ),
    SearchAnswer(
        kind=AnswerKind.SEVERAL,
        items=(2, 9),
        groups=(frozenset({2}), frozenset({9})),
        passing=_all_but(12, 2, 9),
        failing=frozenset({2}),
    ),
)
LENGTHS = Subject(
    form=SubjectForm.VALUE, key="model.seq_len", noun="model.seq_len", items=tuple(range(17, 257)), good=16
)
THRESHOLD = bisection(
    LENGTHS,
    search(
        LENGTHS,
        (
            (R, range(112), BAD, (0, 240)),
            (R, range(48), GOOD, (0, 112)),
            (R, range(80), BAD, (48, 112)),
            (R, range(79), GOOD, (78, 80)),
            (Purpose.PROOF_BAD, range(80), BAD, (79, 80)),
            (Purpose.PROOF_GOOD, range(79), GOOD, (79, 80)),
        ),
    ),
    SearchAnswer(kind=AnswerKind.THRESHOLD, items=(80,), passing=frozenset(range(79)), failing=frozenset(range(80))),
    command="nsa-harness bisect gc_baseline_full --seq-len",
)
COUNT = bisection(
    TWELVE,
    search(
        TWELVE,
        (
            (R, range(6), BAD, (0, 12)),
            (R, range(4), GOOD, (0, 6)),
            (R, range(5), BAD, (4, 6)),
            (A, {4}, GOOD, (0, 5)),
            (Purpose.ELSEWHERE, {1, 3, 6, 8, 11}, BAD, (0, 12)),
            (Purpose.AS_MANY, {0, 2, 5, 7, 10}, BAD, (0, 12)),
            (Purpose.ONE_FEWER, {0, 4, 6, 9}, GOOD, (0, 12)),
        ),
    ),
    SearchAnswer(
        kind=AnswerKind.COUNT,
        items=(5,),
        confidence=0.9375,
        why="not all sets of the size were asked, but a sample",
        passing=frozenset(range(4)),
        failing=frozenset(range(5)),
    ),
)
NONE = bisection(
    TWELVE,
    [
        probe(TWELVE, 1, Purpose.CONTROL_GOOD, (), GOOD),
        probe(TWELVE, 2, Purpose.CONTROL_BAD, range(12), GOOD),
        probe(TWELVE, 3, Purpose.CONTROL_BAD, range(12), GOOD),
    ],
    SearchAnswer(
        kind=AnswerKind.NONE,
        confidence=0.95,
        why="the bad end was good 2 of 2 times: nothing to bisect, unless it fails in less than 78%",
        passing=frozenset(range(12)),
    ),
    signature=None,
)
KEYS = Subject(
    form=SubjectForm.KEYS,
    key="keys",
    noun="key",
    items=("parallel.wrapper", "parallel.static_graph", "gc.mode", "run.env.NCCL_P2P_DISABLE", "model.branch"),
    good_values=("ddp", False, "non_reentrant", None, "all"),
    bad_values=("fsdp", True, "reentrant", "1", "cmp+sel"),
    together=((0, 1),),
)
ONE_KEY = bisection(
    KEYS,
    search(
        KEYS,
        (
            (R, range(2), GOOD, (0, 5)),
            (R, range(3), BAD, (2, 5)),
            (A, {2}, BAD, (0, 3)),
            (Purpose.PROOF_BAD, {2}, BAD, (2, 3)),
            (Purpose.PROOF_GOOD, _all_but(5, 2), GOOD, (2, 3)),
        ),
    ),
    SearchAnswer(kind=AnswerKind.SINGLE, items=(2,), passing=_all_but(5, 2), failing=frozenset({2})),
    command="nsa-harness bisect --set=good.yaml,bad.yaml",
)
FLAKY = bisection(
    TWELVE,
    search(
        TWELVE,
        (
            (Purpose.REPEAT, range(12), GOOD, (0, 12)),
            (Purpose.REPEAT, range(12), BAD, (0, 12)),
            (R, range(6), GOOD, (0, 12)),
            (R, range(8), BAD, (3, 12)),
            (R, range(7), GOOD, (5, 9)),
            (R, range(7), GOOD, (6, 8)),
            (Purpose.PROOF_BAD, {7}, GOOD, (7, 8)),
            (Purpose.PROOF_BAD, {7}, BAD, (7, 8)),
            (Purpose.PROOF_GOOD, _all_but(12, 7), GOOD, (7, 8)),
        ),
    ),
    SearchAnswer(
        kind=AnswerKind.SINGLE,
        items=(7,),
        confidence=0.97,
        p_bad=0.5,
        passing=_all_but(12, 7),
        failing=frozenset({7}),
    ),
)


def _undecided() -> BisectReport:
    probes = [
        *controls(TWELVE),
        probe(TWELVE, 3, R, range(6), GOOD, left=3),
        probe(
            TWELVE,
            4,
            R,
            range(9),
            DIFFERENT,
            open=(6, 12),
            left=2,
            verdict="FAIL",
            kind=None,
            cause="host_oom",
            summary="rank 0 was killed: the machine ran out of memory",
            place=None,
            phase="forward",
        ),
        probe(
            TWELVE,
            5,
            R,
            range(8),
            UNRESOLVED,
            open=(6, 12),
            left=2,
            verdict=None,
            kind=None,
            cause=None,
            summary="gc.layers: expected at most 8 layers",
            place=None,
            culprits=(),
            dir=None,
            spec_hash=None,
            wall_s=0.0,
        ),
        probe(
            TWELVE,
            6,
            R,
            range(7),
            UNRESOLVED,
            open=(6, 12),
            left=1,
            verdict="ERROR",
            kind=None,
            cause="infra",
            summary="torchrun could not bind its port",
            place=None,
            culprits=(),
        ),
    ]
    answer = SearchAnswer(
        kind=AnswerKind.UNDECIDED,
        confidence=0.0,
        why="between layers 0-5 and all 12 nothing could be judged",
        open=tuple(range(6, 12)),
        passing=frozenset(range(6)),
        failing=frozenset(range(12)),
    )
    return bisection(TWELVE, probes, answer)


UNDECIDED = _undecided()
INTERRUPTED = replace(
    UNDECIDED,
    interrupted=True,
    probes=UNDECIDED.probes[:3],
    answer=SearchAnswer(
        kind=AnswerKind.UNDECIDED, confidence=0.0, why="interrupted; the same command continues the search"
    ),
    commands=Commands(bad=None, good=None, alone=None),
)
MANY = layers(96)
NINETY_SIX = bisection(
    MANY,
    search(
        MANY,
        (
            (R, range(48), GOOD, (0, 96)),
            (R, range(72), BAD, (48, 96)),
            (R, range(60), GOOD, (48, 72)),
            (R, range(66), BAD, (60, 72)),
            (R, range(63), GOOD, (60, 66)),
            (R, range(64), BAD, (63, 66)),
            (A, {63}, BAD, (0, 64)),
            (Purpose.PROOF_BAD, {63}, BAD, (63, 64)),
            (Purpose.PROOF_GOOD, _all_but(96, 63), GOOD, (63, 64)),
        ),
    ),
    SearchAnswer(kind=AnswerKind.SINGLE, items=(63,), passing=_all_but(96, 63), failing=frozenset({63})),
)
EARLY = replace(
    SINGLE,
    probes=tuple(
        replace(one, early=True, verdict=None, kind=None, cause=None, place=None, wall_s=2.1)
        if one.n in (4, 6, 7)
        else one
        for one in SINGLE.probes
    ),
)
INDEPENDENT = bisection(
    TWELVE,
    search(
        TWELVE,
        [(Purpose.REPEAT, range(12) if n % 2 else (), BAD if n % 3 else GOOD, (0, 12)) for n in range(1, 13)],
    ),
    SearchAnswer(
        kind=AnswerKind.INDEPENDENT,
        confidence=0.95,
        p_bad=9 / 14,
        why="both ends fail alike often, 5 of 7 and 4 of 7 times",
    ),
)
ZONES = bisection(
    LENGTHS,
    search(
        LENGTHS,
        (
            (R, range(112), DIFFERENT, (0, 240)),
            (R, range(48), GOOD, (0, 112)),
            (R, range(80), DIFFERENT, (48, 112)),
            (R, range(79), GOOD, (78, 80)),
            (R, range(200), BAD, (112, 240)),
            (R, range(199), DIFFERENT, (198, 200)),
        ),
    ),
    SearchAnswer(
        kind=AnswerKind.UNDECIDED,
        confidence=0.0,
        why="another failure lies between what passes and what fails in the way sought, and hides where that begins",
        open=tuple(range(79, 200)),
        passing=frozenset(range(79)),
        failing=frozenset(range(200)),
        zones=(
            Zone(start=0, stop=80, counts_as=GOOD),
            Zone(start=80, stop=200, counts_as=DIFFERENT),
            Zone(start=200, stop=241, counts_as=BAD),
        ),
    ),
    command="nsa-harness bisect gc_baseline_full --seq-len",
)
ZONES = replace(
    ZONES,
    probes=tuple(
        replace(one, verdict="FAIL", cause="exception", summary="rank 0 raised ImportError: no module named flash")
        if one.counts_as is DIFFERENT
        else one
        for one in ZONES.probes
    ),
)
COMMITS = Subject(
    form=SubjectForm.COMMIT,
    key="commit",
    noun="commit",
    items=("a1", "b2", "c3", "d4"),
    good="0a0a",
    labels=tuple(f"{sha}00 Change {number}" for number, sha in enumerate(("a1", "b2", "c3", "d4"))),
)
COMMIT = bisection(
    COMMITS,
    search(COMMITS, ((R, range(2), GOOD, (0, 4)), (R, range(3), BAD, (2, 4)))),
    SearchAnswer(kind=AnswerKind.THRESHOLD, items=(3,), passing=frozenset({0, 1}), failing=frozenset({0, 1, 2})),
)


def hostile() -> BisectReport:
    """Every text attacks."""
    subject = replace(TWELVE, key=POISON, noun=POISON)
    place = Place(file=POISON, line=1, function=POISON, module=POISON, text=POISON)
    asked = search(subject, ((R, range(6), GOOD, (0, 12)), (R, range(9), BAD, (6, 12))))
    probes = tuple(
        replace(
            one,
            verdict=POISON,
            cause=POISON,
            summary=POISON,
            place=place,
            phase=POISON,
            launcher=POISON,
            dir=POISON,
        )
        for one in asked
    )
    return bisection(
        subject,
        probes,
        replace(SINGLE.answer, why=POISON),
        scenario=POISON,
        what=POISON,
        command=POISON,
        notes=(POISON,),
        not_covered=(POISON,),
        commands=Commands(bad=POISON, good=POISON, alone=POISON),
        signature=Signature(verdict=POISON, cause=POISON, place=POISON),
    )


SAMPLES = {
    "single": SINGLE,
    "range": RANGE,
    "set": SET,
    "several": SEVERAL,
    "threshold": THRESHOLD,
    "count": COUNT,
    "none": NONE,
    "undecided": UNDECIDED,
    "interrupted": INTERRUPTED,
    "one_key": ONE_KEY,
    "flaky": FLAKY,
    "ninety_six": NINETY_SIX,
    "commit": COMMIT,
    "early": EARLY,
    "independent": INDEPENDENT,
    "zones": ZONES,
    "hostile": hostile(),
}
