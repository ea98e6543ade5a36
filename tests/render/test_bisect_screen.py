"""What the terminal shows of a bisection: the question, the picture, the line while it runs, the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from bisect_samples import (
    BAD,
    COUNT,
    DIFFERENT,
    FLAKY,
    GOOD,
    INTERRUPTED,
    MANY,
    NINETY_SIX,
    NONE,
    ONE_KEY,
    RANGE,
    SAMPLES,
    SET,
    SEVERAL,
    SINGLE,
    THRESHOLD,
    TWELVE,
    UNDECIDED,
    UNRESOLVED,
    R,
    bisection,
    hostile,
    layers,
    probe,
)
from render_samples import POISON
from rich.cells import cell_len

from nsa_harness.core.experiment.trial import Signature
from nsa_harness.core.search.effort import EffortCase, Stage
from nsa_harness.core.search.question import AnswerKind, ProbeResult, Purpose, Round, SearchAnswer, Zone
from nsa_harness.core.search.report import BisectReport, ProbeReport, ended_s
from nsa_harness.core.search.subject import Subject, SubjectForm
from nsa_harness.core.search.waits import Waiting
from nsa_harness.render.experiments import words as bisect_words
from nsa_harness.render.experiments.picture import Grid, row, rows
from nsa_harness.render.experiments.screen import (
    CaseTime,
    PlannedControl,
    answer_lines,
    header_lines,
    plan_lines,
    progress_line,
    stored_lines,
    waiting_text,
)
from nsa_harness.render.text import ascii_only

Golden = Callable[[str, str], None]
TWO_VARIABLES = Subject(
    form=SubjectForm.KEYS,
    key="run.env",
    noun="variable",
    items=("run.env.NCCL_P2P_DISABLE", "run.env.OMP_NUM_THREADS"),
    good_values=(None, None),
    bad_values=("1", "4"),
)
OPEN = SearchAnswer(kind=AnswerKind.UNDECIDED, confidence=0.0)
RUN_DIR = Path("reports/20261121T101500-3f2a")


def shown(told: BisectReport, width: int) -> list[str]:
    return list(stored_lines(told, RUN_DIR, width))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_screen_of_each_kind_of_answer_is_as_recorded(golden: Golden, name: str) -> None:
    golden(f"bisect.{name}.txt", "\n".join(shown(SAMPLES[name], 100)) + "\n")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_screen_of_many_layers_is_as_recorded(golden: Golden, width: int) -> None:
    golden(f"bisect.ninety_six.{width}.txt", "\n".join(shown(NINETY_SIX, width)) + "\n")


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", sorted(set(SAMPLES) - {"hostile"}))
def test_a_line_is_wider_than_the_screen_only_to_keep_a_command_whole(name: str, width: int) -> None:
    told = SAMPLES[name]
    whole = {*vars(told.commands).values(), f"{RUN_DIR}/BISECT.md", f"{RUN_DIR}/report.html"}
    assert [line for line in shown(told, width) if cell_len(line) > width and line.strip() not in whole] == []


def test_a_terminal_without_our_signs_gets_the_same_columns() -> None:
    lines = shown(NINETY_SIX, 80)
    plain = [ascii_only(line) for line in lines]
    assert all(line.isascii() for line in plain)
    assert [len(line) for line in plain] == [len(line) for line in lines]
    assert any("###+" in line for line in plain)


def test_hostile_text_cannot_steer_the_terminal() -> None:
    text = "".join(shown(hostile(), 80))
    assert POISON not in text
    assert set("\x1b\x9b\x07\x00\r\n\u202e").isdisjoint(text)


def test_the_pools_hold_every_item_once_and_none_is_wider_than_the_room() -> None:
    for count in (1, 2, 11, 12, 37, 48, 96, 500, 5000):
        for width in (40, 80, 120):
            subject = layers(count)
            told = bisection(subject, [probe(subject, 1, R, range(count), BAD)], OPEN)
            lines = list(Grid(subject=subject, width=width).row(row(told, told.probes[0], None)))
            picture = "".join(lines[: 2 if width < 60 else 1])
            assert max(map(cell_len, lines)) <= width
            assert set("■▒·") & set(picture) == {"■"}


def test_a_column_of_several_items_says_when_some_of_them_are_on() -> None:
    told = bisection(MANY, [probe(MANY, 1, R, {63}, BAD)], SINGLE.answer)
    line = next(Grid(subject=MANY, width=100).row(row(told, told.probes[0], None)))
    assert line.count("▒") == 1
    assert "■" not in line


def test_layers_that_do_not_begin_at_0_keep_their_numbers() -> None:
    subject = layers(4, start=4)
    told = bisection(
        subject,
        [probe(subject, 1, R, {0, 1}, BAD)],
        SearchAnswer(kind=AnswerKind.SINGLE, items=(1,), failing=frozenset({1})),
    )
    key, head, line, *_ = Grid(subject=subject, width=100).whole(rows(told))
    assert key.strip() == "■ on, · off; [5,9) is layers 5 to 8"
    assert head.split() == ["layer", "4", "5", "6", "7"]
    assert line.split()[1:4] == ["[4,8)", "→", "[4,6)"]
    assert bisect_words.headline(told) == "layer 5 alone"
    assert bisect_words.setting_text(told) == "NSA_GC_RANGE=5:6"


def test_the_next_round_says_what_is_left_and_not_the_answer_alone() -> None:
    told = bisection(TWELVE, [probe(TWELVE, 1, R, range(6), GOOD)], SINGLE.answer)
    grid = Grid(subject=TWELVE, width=100)
    (alone,) = grid.row(row(told, told.probes[0], None))
    (followed,) = grid.row(row(told, told.probes[0], replace(told.probes[0], open=(3, 12))))
    assert "[0,12) → [6,12)" in alone
    assert "[0,12) → [3,12)" in followed


def test_one_answer_of_a_flaky_run_narrows_nothing_by_itself() -> None:
    last = FLAKY.probes[7]
    (line,) = Grid(subject=TWELVE, width=100).row(row(FLAKY, last, None))
    assert "[6,8)  " in line
    assert "→" not in line


def test_another_failure_is_said_to_be_another() -> None:
    remarks = [one.remark for one in rows(UNDECIDED)]
    assert remarks[3] == "another failure: host_oom, rank 0 was killed: the machine ran out of memory"
    assert remarks[4] == "could not be launched: gc.layers: expected at most 8 layers"
    assert remarks[5] == "not judged: torchrun could not bind its port"


def test_a_failure_elsewhere_that_counts_is_not_called_the_same() -> None:
    elsewhere = replace(SINGLE.probes[3], cause="exception", verdict="FAIL", place=None)
    told = replace(SINGLE, probes=(*SINGLE.probes[:3], elsewhere))
    assert row(told, SINGLE.probes[3], None).remark == "same"
    assert row(told, elsewhere, None).remark == "also counts: FAIL · exception"


def test_how_often_a_configuration_ended_so_is_counted_up_to_its_row() -> None:
    assert [one.remark[-6:] for one in islice(rows(FLAKY), 1, 4)] == ["ayer 7", "1 of 2", "2 of 3"]


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (SINGLE, "It hangs with layer 7 alone."),
        (RANGE, "It hangs with layers 4-8 [4:9], all of them together."),
        (SET, "It hangs with layers 3 and 8, only together."),
        (SEVERAL, "It hangs with layer 2; layer 9: each is enough on its own."),
        (THRESHOLD, "It hangs with model.seq_len 96 and above, not 95."),
        (COUNT, "It hangs with any 5 layers, whichever they are."),
        (ONE_KEY, "It hangs with key gc.mode alone."),
        (SAMPLES["commit"], "It hangs since commit c300 Change 2."),
        (UNDECIDED, "The search did not reach an answer: between layers 0-5 and all 12 nothing could be judged."),
    ],
)
def test_each_answer_is_one_sentence(told: BisectReport, sentence: str) -> None:
    assert bisect_words.sentence(told) == sentence


def test_of_neighbours_alone_it_is_said_what_no_range_can_tell_and_each_range_that_passes() -> None:
    """Nobody has asked whether layers between the ends are needed, and everything else is two ranges."""
    row = replace(RANGE.subject, in_a_row=True)
    rests = [probe(row, 20 + n, Purpose.PROOF_GOOD, rest, GOOD) for n, rest in enumerate((range(5, 12), range(8)))]
    told = replace(
        RANGE,
        subject=row,
        probes=(*(one for one in RANGE.probes if one.purpose is not Purpose.PROOF_GOOD), *rests),
        answer=replace(RANGE.answer, passing=frozenset(range(8))),
    )
    assert bisect_words.sentence(told) == "It hangs with layers 4-8 [4:9], and no smaller range."
    assert list(bisect_words.proven_claims(told))[1:3] == [
        "with layers 0-7 [0:8] it passes: 2 of 2 under fork and torchrun",
        "with layers 5-11 [5:12] it passes: 1 of 1 under torchrun",
    ]
    two = replace(told, answer=replace(told.answer, items=(4, 6)))
    assert bisect_words.headline(two) == "layers 4-5 [4:6], all of them together"
    count = replace(COUNT, subject=row)
    assert bisect_words.sentence(count) == "It hangs with any 5 consecutive layers."


def test_a_flaky_answer_says_how_often_by_counts_and_how_sure_it_is() -> None:
    lines = list(answer_lines(FLAKY, RUN_DIR, 100))
    assert lines[0].startswith("ANSWER  layer 7 alone   (NSA_GC_RANGE=7:8)   97 % sure")
    often = "hangs in 1 of 2 runs (1 % to 99 %) with layer 7, in 0 of 1 runs (0 % to 97 %) at the good end"
    assert bisect_words.failure_rate_text(FLAKY) == often


def test_another_failure_is_no_run_of_a_frequency() -> None:
    other = replace(FLAKY.probes[9], n=99, counts_as=DIFFERENT)
    assert bisect_words.failure_rate_text(
        replace(FLAKY, probes=(*FLAKY.probes, other))
    ) == bisect_words.failure_rate_text(FLAKY)


def test_what_does_not_depend_is_told_by_the_counts_of_both_ends() -> None:
    told = SAMPLES["independent"]
    assert bisect_words.sentence(told).startswith(
        "The failure does not depend on what was varied: both ends fail alike often"
    )
    often = "hangs in 5 of 7 runs (29 % to 96 %) at the bad end, in 4 of 7 runs (18 % to 90 %) at the good end"
    assert bisect_words.failure_rate_text(told) == often


def test_what_is_not_certain_is_never_rounded_to_certain() -> None:
    assert bisect_words.certainty_text(replace(FLAKY.answer, confidence=0.9999)) == "99 % sure"


def test_a_probe_that_was_ended_early_is_no_hang() -> None:
    early = [one for one in rows(SAMPLES["early"]) if one.counts_as is BAD and one.verdict != "HANG"]
    assert [(one.n, one.verdict, one.took, one.remark) for one in early] == [
        (4, "wait", "2.1 s", "same wait, stopped early"),
        (6, "wait", "2.1 s", "same wait, stopped early"),
        (7, "wait", "2.1 s", "same wait, stopped early"),
    ]


def test_zones_are_told_by_their_first_and_last_value() -> None:
    told = SAMPLES["zones"]
    assert (
        bisect_words.zones_text(told)
        == "passes up to 95, fails in another way (ImportError) from 96 to 215, hangs from 216"
    )
    assert bisect_words.open_text(told) == "the first model.seq_len that hangs can be any value between 96 and 216"
    commits = SAMPLES["commit"]
    zones = (
        Zone(start=0, stop=2, counts_as=GOOD),
        Zone(start=2, stop=3, counts_as=UNRESOLVED),
        Zone(start=3, stop=5, counts_as=BAD),
    )
    told = replace(commits, answer=replace(commits.answer, zones=zones))
    assert bisect_words.zones_text(told) == "passes up to a100, cannot be judged at b200, hangs from c300"


def test_another_failure_is_named_by_its_cause_where_no_exception_is_known() -> None:
    killed = [
        replace(one, summary="rank 0 was killed", cause="host_oom") if one.counts_as is DIFFERENT else one
        for one in SAMPLES["zones"].probes
    ]
    told = bisect_words.zones_text(replace(SAMPLES["zones"], probes=tuple(killed)))
    assert "fails in another way (host_oom) from 96 to 215" in told


@pytest.mark.parametrize(
    ("open_", "told"),
    [
        (range(1, 3), "the first commit that hangs can be any of: b200 Change 1; c300 Change 2"),
        (range(3, 4), "the first commit that hangs can only be d400 Change 3"),
    ],
)
def test_commits_that_may_be_the_first_are_named_and_not_numbered(open_: range, told: str) -> None:
    assert bisect_words.open_text(replace(SAMPLES["commit"], answer=replace(OPEN, open=tuple(open_)))) == told


def test_of_very_many_commits_the_first_ones_are_named() -> None:
    names = tuple(f"e{n} Change" for n in range(50))
    many = replace(SAMPLES["commit"].subject, items=names, labels=names)
    told = bisect_words.open_text(replace(SAMPLES["commit"], subject=many, answer=replace(OPEN, open=tuple(range(50)))))
    assert told.endswith("; e20 Change; 29 more")


def test_a_claim_nobody_asked_for_is_said_to_be_unasked() -> None:
    unasked = replace(SINGLE, probes=SINGLE.probes[:6])
    assert list(bisect_words.proven_claims(unasked)) == [
        "layer 7: not launched on its own",
        "layers 0-6 and 8-11: not launched on its own",
    ]


def test_of_several_culprits_each_is_claimed_by_itself() -> None:
    assert list(bisect_words.proven_claims(SEVERAL))[:2] == [
        "with layer 2 it hangs: 1 of 1 under fork",
        "with layer 9 it hangs: 1 of 1 under fork",
    ]


def test_an_interrupted_search_says_what_is_open_and_how_to_go_on() -> None:
    text = "\n".join(answer_lines(INTERRUPTED, RUN_DIR, 100))
    assert text.startswith("UNDECIDED  layers 6-11 [6:12] are still open")
    assert "give the same command again: finished probes are not repeated" in text


def test_nothing_to_bisect_claims_no_place_and_no_proof() -> None:
    text = "\n".join(answer_lines(NONE, RUN_DIR, 100))
    assert text.startswith("ANSWER  nothing to bisect")
    assert "  place" not in text
    assert "  tells" not in text


def test_in_all_is_the_time_that_people_waited() -> None:
    first, second, third, *_ = SINGLE.probes
    side_by_side = (
        replace(first, started_s=1.0, wall_s=4.0),
        replace(second, started_s=1.5, wall_s=6.0),
        replace(third, started_s=8.0, wall_s=2.0),  # of a later session: the clock stood in between
    )
    told = replace(SINGLE, probes=side_by_side, wall_s=12.0, search_probes=1)
    assert bisect_words.effort_text(told) == "3 probes (1 for the search), 9.0 s in all"
    unknown = replace(told, probes=(replace(first, started_s=None), *side_by_side[1:]))
    assert bisect_words.effort_text(unknown) == "3 probes (1 for the search), 12.0 s in all"
    assert ended_s(side_by_side) == 10.0


def test_names_stand_in_their_columns_where_they_fit_and_else_hang_from_them() -> None:
    wide, narrow = (list(Grid(subject=TWO_VARIABLES, width=width).head()) for width in (100, 70))
    assert [line.rstrip() for line in wide[1:]] == ["                variable  NCCL_P2P_DISABLE=1 OMP_NUM_THREADS=4"]
    assert narrow == [
        "        ■ on, · off",
        "                variable  1 2",
        "                          │ └ OMP_NUM_THREADS=4",
        "                          └ NCCL_P2P_DISABLE=1",
    ]
    assert all(ascii_only(line).isascii() and len(ascii_only(line)) == len(line) for line in narrow)
    many = replace(TWO_VARIABLES, items=TWO_VARIABLES.items * 30, bad_values=("1", "4") * 30, good_values=(None,) * 60)
    assert "   60  OMP_NUM_THREADS=4" in list(Grid(subject=many, width=100).head())


def test_no_screen_guesses() -> None:
    for told in SAMPLES.values():
        text = "\n".join(shown(told, 100)).lower()
        assert [word for word in ("possible", "root cause", "seems", "probably") if word in text] == []


def asking(subject: Subject, signature: bool = False) -> str:
    told = bisection(subject, (), OPEN, signature=SINGLE.signature if signature else None)
    return next(iter(header_lines(told, 200))).split("   ")[1]


CHOICE = Subject(form=SubjectForm.CHOICE, key="parallel.wrapper", noun="value", items=("ddp", "fsdp", "none", "manual"))


def test_of_a_choice_both_lists_are_told_with_how_often_each_value_was_asked() -> None:
    answer = SearchAnswer(
        kind=AnswerKind.CHOICE, items=(1,), open=(3,), failing=frozenset({1}), passing=frozenset({0}), why="one is open"
    )  # fmt: skip
    asked = ((0, GOOD), (1, BAD), (2, GOOD), (3, ProbeResult.DIFFERENT), (1, BAD))
    probes = [probe(CHOICE, n, Purpose.EACH, {place}, how) for n, (place, how) in enumerate(asked, start=1)]
    told = bisection(CHOICE, probes, answer)
    assert bisect_words.headline(told) == "value fsdp, not values ddp and none"
    assert [claim.partition(" under")[0] for claim in bisect_words.proven_claims(told)] == [
        "with value ddp it passes: 1 of 1",
        "with value fsdp it hangs: 2 of 2",
        "with value none it passes: 1 of 1",
        "value manual: not decided",
        "one is open",
    ]


def _remark(told: BisectReport, one: ProbeReport) -> str:
    return row(told, one, None).remark


def test_of_what_is_slow_both_rates_are_told_and_no_place() -> None:
    subject = THRESHOLD.subject
    slow = Signature(verdict="slow", cause=None, place=None)
    place = len(subject.items) - 1
    answer = replace(
        THRESHOLD.answer, items=(place + 1,), passing=frozenset(), failing=frozenset(range(place + 1))
    )  # fmt: skip
    good = probe(subject, 1, Purpose.CONTROL_GOOD, (), GOOD, step_s=0.0304)
    bad = probe(subject, 2, Purpose.CONTROL_BAD, range(place + 1), BAD, verdict="PASS", step_s=1.26)
    told = bisection(subject, [good, bad], answer, signature=slow)
    with_bad, with_good = subject.describe(range(place + 1)), subject.describe(())
    assert next(bisect_words.proven_claims(told)) == f"a step takes 1.3 s with {with_bad}, 30.4 ms with {with_good}"
    assert _remark(told, good) == "30.4 ms a step"
    assert _remark(told, bad) == "1.3 s a step, slow"
    assert bisect_words.place_parts(told) == ()
    assert bisect_words.question(told).endswith("does it become slow?")
    assert bisect_words.sentence(told).startswith("It is slow with ")
    none = replace(good, counts_as=ProbeResult.UNRESOLVED, step_s=None)
    assert "fewer than two optimizer steps" in _remark(told, none)
    assert "three optimizer steps" in bisect_words.advice(replace(told, probes=(none,)))


def test_every_form_of_a_question_has_its_words() -> None:
    forms = {
        SubjectForm.LAYERS: TWELVE,
        SubjectForm.VALUE: THRESHOLD.subject,
        SubjectForm.COMMIT: SAMPLES["commit"].subject,
        SubjectForm.KEYS: ONE_KEY.subject,
        SubjectForm.PARTS: Subject(
            form=SubjectForm.PARTS, key="model.branch", noun="branch", items=("cmp", "sel", "win")
        ),
        SubjectForm.WORDS: Subject(form=SubjectForm.WORDS, key="train.data", noun="value", items=("a", "b")),
        SubjectForm.CHOICE: CHOICE,
        SubjectForm.FILE: replace(ONE_KEY.subject, form=SubjectForm.FILE),
    }
    assert set(forms) == set(SubjectForm)
    assert {form: asking(subject) for form, subject in forms.items()} == {
        SubjectForm.LAYERS: "which checkpointed layers make it fail?",
        SubjectForm.VALUE: "at which model.seq_len does it start to fail?",
        SubjectForm.COMMIT: "which commit makes it fail?",
        SubjectForm.KEYS: "which of 5 keys make it fail?",
        SubjectForm.PARTS: "which branches of the attention make it fail?",
        SubjectForm.WORDS: "which values make it fail?",
        SubjectForm.CHOICE: "which values make it fail?",
        SubjectForm.FILE: "which of 5 keys make it fail?",
    }
    assert asking(TWELVE, signature=True) == "which checkpointed layers make it HANG?"
    assert asking(replace(TWELVE, key="layers")) == "which layers make it fail?"


def test_every_purpose_has_its_words() -> None:
    told = bisection(TWELVE, [probe(TWELVE, 1, purpose, {7}, BAD) for purpose in Purpose], SINGLE.answer)
    lines = list(Grid(subject=TWELVE, width=120).whole(rows(told)))
    assert len(lines) == 2 + len(Purpose)
    steps = {" ".join(line[5:24].split()) for line in lines[2:]}
    assert len(steps) >= len(Purpose) - 6  # controls, edges and re-checks share theirs
    assert all(steps)


def running(
    told: BisectReport,
    purpose: Purpose,
    open_: tuple[int, int],
    left: int,
    at_once: int = 1,
    left_s: float | None = None,
) -> str:
    round_ = Round(subsets=(frozenset({0}),) * at_once, purpose=purpose, open=open_, probes_left=left)
    return progress_line(told, round_, 3.1, 100, left_s)


def test_the_line_of_a_running_probe_says_what_is_left() -> None:
    so_far = replace(SINGLE, probes=SINGLE.probes[:4])
    line = running(so_far, R, (6, 9), 1, left_s=144.4)
    assert line == "  layers [0,12) → [6,9), about 2 probes; 2 min 24 s left in all   probe 5, 3.1 s"
    line = running(so_far, Purpose.PROOF_BAD, (7, 8), 0, left_s=0.4)
    assert line == "  layers [0,12), proof; 1 s left in all   probe 5, 3.1 s"
    first = replace(THRESHOLD, probes=())
    assert running(first, Purpose.CONTROL_GOOD, (0, 240), 0) == ("  seq_len (16, 256], controls first   probe 1, 3.1 s")
    assert running(first, R, (0, 240), 5, 3) == "  seq_len (16, 256], about 8 probes left   probes 1-3, 3.1 s"


def test_who_waits_is_told_why_until_when_and_what_shortens_it() -> None:
    proves = Waiting(no_progress_s=12.0, until_s=60.0, was_proven=False, limit="open_wait_s")
    assert waiting_text(proves) == (
        "no progress for 12 s: the hang is proven at 60 s; limits.open_wait_s=30 would shorten this"
    )
    assert waiting_text(replace(proves, was_proven=True, until_s=20.0), 3.0) == (
        "no progress for 15 s: an earlier probe proved that this wait is a hang, so this probe counts as bad at 20 s"
    )
    sleeps = replace(proves, until_s=None)
    assert (
        waiting_text(sleeps)
        == "no progress for 12 s: a sleep that ends on its own; limits.deadline_s=60 would limit it"
    )


def test_a_probe_that_ended_early_has_its_row_and_is_no_hang() -> None:
    early = replace(SINGLE.probes[-1], early=True, verdict=None, kind=None, cause=None, place=None, culprits=())
    told = replace(SINGLE, probes=(*SINGLE.probes[:-1], early))
    rows = [line for line in shown(told, 100) if " wait " in line]
    assert len(rows) == 1
    assert "4.2 s  same wait, stopped early" in rows[0]
    alone = replace(early, subset=((7, 8),))
    told = replace(told, probes=(*SINGLE.probes, alone))
    assert bisect_words.failing_probe(told) == SINGLE.probes[8]  # of an early one no line is known
    claim = next(bisect_words.proven_claims(told))
    assert claim == "with layer 7 it hangs: 3 of 3 under fork and torchrun, 1 more stopped early in the same wait"


def test_the_line_of_a_running_probe_never_wraps() -> None:
    for width in (10, 39, 79):
        round_ = Round(subsets=(frozenset(),), purpose=R, open=(0, 12), probes_left=3)
        assert cell_len(progress_line(hostile(), round_, 3.1, width)) <= width


def test_the_plan_says_the_worst_case_by_part_and_launches_nothing(golden: Golden) -> None:
    controls = (
        PlannedControl(name="good", config="no layer", command="nsa-harness run gc_baseline_full gc.layers=none"),
        PlannedControl(name="bad", config="all 12 layers", command=None, reason="needs 2 GPUs, this machine has none"),
    )
    parts = (
        Stage(name="controls", probes=2),
        Stage(name="right edge", probes=4),
        Stage(name="left edge", probes=4),
        Stage(name="special sets", probes=4),
        Stage(name="next culprit", probes=21, only_if="there are several culprits"),
    )
    known = (
        CaseTime(case=EffortCase(name="the bad end never fails", probes=4), takes_s=8.0),
        CaseTime(case=EffortCase(name="two items or a range are needed", probes=14), takes_s=61.0),
        CaseTime(case=EffortCase(name="each more that is enough", probes=21, is_additional=True), takes_s=100.0),
        CaseTime(case=EffortCase(name="it fails in half of its runs", probes=50, is_estimate=True), takes_s=None),
    )
    told = replace(SINGLE, probes=(), signature=None)
    lines = [*plan_lines(told, parts, known, controls, 100, "a run takes 2 s"), *plan_lines(told, parts, (), (), 40)]
    golden("bisect.plan.txt", "\n".join(lines) + "\n")


def test_a_probe_that_failed_in_another_way_is_not_the_one_that_fails() -> None:
    last = replace(SINGLE.probes[4], n=99, counts_as=DIFFERENT)
    found = bisect_words.failing_probe(replace(SINGLE, probes=(*SINGLE.probes, last)))
    assert found is not None
    assert found.n == 9  # the last proof of layer 7 alone


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"known": (6,), "open": (0, 1)}, "layer 6 is needed; layers 0-1 [0:2] are still open"),
        ({"known": (2, 6), "open": (4,)}, "layers 2 and 6 are needed; layer 4 is still open"),
        ({"known": (6,), "open": ()}, "layer 6 is needed; the proof is still open"),
        ({"open": tuple(range(12))}, "one of layers 6-11 [6:12] is needed; layers 0-11 [0:12] are still open"),
        ({"open": tuple(range(6, 12))}, "layers 6-11 [6:12] are still open"),
    ],
)
def test_a_search_that_was_cut_short_tells_what_is_needed_and_what_is_open(answer: dict[str, Any], said: str) -> None:
    told = replace(UNDECIDED, answer=replace(UNDECIDED.answer, **answer))
    assert bisect_words.open_text(told) == said
