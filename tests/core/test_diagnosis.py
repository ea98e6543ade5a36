"""The cause of a verdict, the culprit, and what else is worth knowing: a run for each rule, and one it must refuse."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import (
    ALL_REDUCE,
    BACKWARD,
    SITE,
    USER,
    Diagnosis,
    board,
    call,
    case,
    collective,
    diagnose,
    ended,
    evidence,
    finding_of,
    frame,
    in_all_reduce,
    locked_in_backward,
    mark,
    process,
    raised,
    rank_evidence,
    rank_snapshot,
    sample,
    snapshot,
    stack,
    stalled,
    task,
)

from nsa_harness.core.diagnosis.confidence import CERTAIN
from nsa_harness.core.diagnosis.context import layer_of
from nsa_harness.core.diagnosis.rules import RULES, failures
from nsa_harness.core.evidence.evidence import Ending, Evidence, Frame, RankEvidence, RankSnapshot, Source
from nsa_harness.core.evidence.gradients import RankTraces
from nsa_harness.core.evidence.host import Task
from nsa_harness.core.outcome.wording import shorten
from nsa_harness.core.plan import Limits
from nsa_harness.core.report import CollectiveRef, Culprit, Finding, Place, Status
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.core.verdict.wait_graph import wait_graph_between

CROSSED = (in_all_reduce(0, collective(6)), in_all_reduce(1, collective(6, "broadcast")))
IN_BLOCK_2 = board(mark("forward", "blocks.2.attn", step=3))


def diagnosed(seen: Evidence) -> Diagnosis:
    return diagnose(seen, judge(seen))


def cause(seen: Evidence) -> str | None:
    return diagnosed(seen).cause


def main(seen: Evidence) -> Finding:
    return diagnosed(seen).findings[0]


def hot_lines(found: Finding) -> list[tuple[int, int | None, int]]:
    """The line, loop line and percentage of each part of a profile."""
    parts = found.facts["hot_parts"]
    return [(part["line"]["line"], part["loop_line"], 100 * part["samples"] // part["of"]) for part in parts]


def short(found: Finding) -> tuple[str, tuple[int, ...], Place | None, tuple[str, ...]]:
    return found.code, found.ranks, found.place, found.proof


def left(rank: int, status: int | None = 0, *, at_s: float = 30.0, **changes: Any) -> RankEvidence:
    return rank_evidence(rank, exit=ended(rank, status, at_s=at_s), **changes)


def line(number: int, function: str = "step", **known: Any) -> Place:
    return Place(file=USER, line=number, function=function, **known)


def test_a_run_that_passed_has_no_cause_and_no_culprit() -> None:
    assert diagnosed(evidence(left(0), left(1))) == Diagnosis(cause=None, culprit=None, findings=())


# Not judged.


@pytest.mark.parametrize(
    ("ending", "code", "proof"),
    [
        (Ending.INTERRUPTED, "interrupted", ()),
        (Ending.CONTROLLER_DIED, "interrupted", ("interrupted",)),
        (Ending.NOT_LAUNCHED, "harness_error", ()),
        (Ending.STALL, "harness_error", ()),
    ],
)
def test_a_run_that_could_not_be_judged_says_so_and_blames_nobody(
    ending: Ending, code: str, proof: tuple[str, ...]
) -> None:
    seen = evidence(rank_evidence(0), ending=ending, launcher=None)
    found = diagnosed(seen)
    assert (found.cause, found.culprit) == (code, None)
    assert short(found.findings[0]) == (code, (), None, proof)
    assert found.findings[0].claim == judge(seen).error


# A rank that left out a collective.


def skipping(**changes: Any) -> tuple[RankEvidence, RankEvidence]:
    """Both made the call in two steps; in the third one rank 1 has passed its point."""
    made = [call(step, step=step, position=5, entered_s=float(step), left_s=step + 0.5) for step in (1, 2)]
    stands = board(
        mark(step=3, position=5), calls=(*made, replace(made[0], number=3, step=3, entered_s=3.0, left_s=None))
    )
    without = board(mark(step=4), rank=1, calls=tuple(made))
    return rank_evidence(0, status_file=stands), rank_evidence(1, **{"status_file": without, **changes})


def test_a_rank_that_skipped_a_collective_before_a_hang_is_the_culprit() -> None:
    found = diagnosed(stalled(*CROSSED, ranks=skipping()))
    assert found.cause == "rank_conditional_collective"
    assert found.culprit == Culprit(
        ranks=(1,), step=3, collective=CollectiveRef(group="0", seq=None, op="all_reduce"), place=line(37)
    )
    assert found.findings[0].ranks == (1,)


def test_a_rank_that_skipped_a_collective_explains_the_abort_of_the_one_that_made_it() -> None:
    aborted = replace(skipping()[0], exit=ended(0, -6), error_lines=("op.preamble.length <= op.nbytes",))
    assert cause(evidence(aborted, skipping()[1])) == "rank_conditional_collective"


def test_a_rank_that_raised_left_out_what_came_after_and_the_exception_is_the_cause() -> None:
    ranks = skipping(exception=raised(1), exit=ended(1, 1))
    assert cause(evidence(*ranks)) == "exception"


def test_a_lost_connection_does_not_hide_the_skipped_collective() -> None:
    lost = replace(skipping()[0], exit=ended(0, 1), exception=raised(0, message="Connection closed by peer"))
    assert cause(evidence(lost, skipping()[1])) == "rank_conditional_collective"


def test_a_run_at_its_deadline_is_slow_whatever_a_rank_skipped() -> None:
    assert cause(stalled(*CROSSED, ranks=skipping(), ending=Ending.DEADLINE)) == "slow"


# A stopped rank.


def test_a_stopped_rank_is_named_with_its_line() -> None:
    stopped = rank_snapshot(1, frame(95), process=process(101, state="T"), proof="dumps/rank1.2.txt")
    seen = stalled(in_all_reduce(0, collective(6)), stopped)
    assert short(main(seen)) == ("stopped_process", (1,), line(95), ("dumps/rank1.2.txt",))


def test_a_rank_that_another_rank_stopped_names_the_line_that_did_it() -> None:
    stopped = rank_snapshot(1, frame(95), process=process(101, state="T", tasks=(task(101),)))
    line = frame(12, file="train.py")  # a status file has no directories
    sender = in_all_reduce(0, collective(6), status_file=board(stopped={101: (line,)}))
    found = main(stalled(sender, stopped))
    assert (found.code, found.ranks) == ("stopped_process", (0,))
    assert found.place is not None
    assert (found.place.file, found.place.line) == (frame(12).file, 12)
    assert found.claim == "rank 1 is stopped by a signal (state T); rank 0 sent it (ada/train.py:12)"


def test_two_stopped_ranks_are_named_both() -> None:
    seen = stalled(*[rank_snapshot(rank, process=process(100 + rank, state="T")) for rank in (0, 1)])
    assert (main(seen).code, main(seen).ranks) == ("stopped_process", (0, 1))


# Locks.


def test_a_lock_inside_the_backward_pass_is_named_with_line_module_and_layer() -> None:
    blocked = replace(locked_in_backward(1), proof="dumps/rank1.2.txt")
    known = rank_evidence(0), rank_evidence(1, status_file=board(mark("backward", "blocks.2.mlp.0", step=3)))
    found = diagnosed(stalled(in_all_reduce(0, collective(6)), blocked, ranks=known))
    place = line(29, "hook", module="blocks.2.mlp.0", layer=2)
    assert short(found.findings[0]) == ("backward_function_blocked", (1,), place, ("dumps/rank1.2.txt",))
    assert found.culprit == Culprit(ranks=(1,), step=3, collective=None, place=place)


def test_a_lock_elsewhere_is_a_lock_cycle() -> None:
    assert short(main(stalled(rank_snapshot(0, frame(12))))) == ("lock_cycle", (0,), line(12), ())


WAITS = frame(327, file="/usr/lib/python3.11/threading.py", function="Condition.wait")


@pytest.mark.parametrize(
    ("file", "function", "stands_in", "what", "ended_by"),
    [
        ("queue.py", "Queue.get", "Queue.get", "an item of a queue", "put one into it"),
        ("queue.py", "put", "Queue.put", "room in a queue", "take an item out of it"),
        ("threading.py", "Event.wait", "Event.wait", "an event", "set it"),
        ("concurrent/futures/_base.py", "Future.result", "Future.result", "the result of a future", "give it"),
        ("threading.py", "Condition.wait", "a lock", "a lock", "release it"),
    ],
)
def test_what_a_thread_would_do_for_another_is_called_as_the_program_calls_it(
    file: str, function: str, stands_in: str, what: str, ended_by: str
) -> None:
    asked = frame(171, file=f"/usr/lib/python3.11/{file}", function=function)
    seen = stalled(rank_snapshot(0, WAITS, asked, frame(12)))
    found = diagnosed(seen).findings[0]
    assert (found.code, found.place) == ("lock_cycle", line(12))
    assert (found.facts["waits_for"], found.facts["ended_by"], found.facts["line"]["line"]) == (what, ended_by, 12)
    assert ("takes twice" in found.advice) == (what == "a lock")
    assert wait_graph_between(*seen.snapshots, (), "gloo").waits[0].blocked_in == f"{stands_in} in step"


# Loops.


def spinning(*lines: int, user: int = 39) -> Evidence:
    before = rank_snapshot(0, frame(39))
    looks = stalled(before, at_s=90.0).snapshots
    spun = replace(looks[1], ranks=(replace(before, process=process(cpu_s=9.0)),))
    samples = tuple(sample(leaf=frame(lines[n % len(lines)]), user=frame(user)) for n in range(20))
    return stalled(before, at_s=90.0, snapshots=(looks[0], spun), samples=samples)


def test_an_endless_loop_is_named_with_the_users_line_that_most_samples_show() -> None:
    found = main(spinning(39, user=50))
    assert short(found) == ("infinite_loop", (0,), line(50), ())
    assert (found.facts["lines"], found.facts["computing"]) == ([39], None)
    assert found.left_open == ("a call on that line may never return",)


def test_a_loop_of_two_lines_names_both() -> None:
    assert main(spinning(40, 39)).facts["lines"] == [39, 40]


def test_a_loop_without_a_users_line_is_placed_where_it_was_seen_last() -> None:
    seen = spinning(39)
    blind = tuple(replace(one, user_frame=None) for one in seen.samples)
    assert main(replace(seen, samples=blind)).place == line(39)


# Slow.


def deadline(*ranks: RankEvidence, **changes: Any) -> Evidence:
    return evidence(*ranks, **{"ending": Ending.DEADLINE, "launcher": ended(None, 1, by_us=True), **changes})


def test_a_run_at_its_deadline_is_slow_with_its_rate_and_the_line_where_the_time_goes() -> None:
    samples = (
        *[sample(1, user=frame(40))] * 9,
        sample(1, "moving", user=frame(39)),
        *[sample(1, user=frame(39))] * 20,
        sample(0, "waiting"),
    )
    working = board(mark("forward", "blocks.0", step=4), steps_s=((1, 10.0), (2, 14.0), (3, 18.0)))
    found = diagnosed(deadline(rank_evidence(0), rank_evidence(1, status_file=working), samples=samples))
    place = line(39, module="blocks.0", layer=0)
    assert short(found.findings[0]) == ("slow", (1,), place, ("profile.txt",))
    facts = found.findings[0].facts
    assert (facts["deadline_s"], facts["pace"]["steps_done"], facts["pace"]["step_s"]) == (600.0, 3, 4.0)
    assert hot_lines(found.findings[0]) == [(39, None, 100)]
    assert found.findings[0].confidence == 0.9
    assert found.culprit == Culprit(ranks=(1,), step=4, collective=None, place=place)
    fewer = deadline(rank_evidence(0), rank_evidence(1, status_file=working), samples=samples[1:])
    assert main(fewer).confidence == 0.75, "29 samples are too few"


def test_ranks_that_spend_their_time_alike_have_no_culprit_and_no_victim() -> None:
    samples = tuple(sample(rank, user=frame(39)) for rank in (0, 1) for _ in range(4))
    found = diagnosed(deadline(rank_evidence(0), rank_evidence(1), samples=samples))
    assert (found.findings[0].ranks, found.findings[0].place) == ((), line(39))
    assert (hot_lines(found.findings[0]), found.findings[0].facts["ranks_alike"]) == ([(39, None, 100)], True)
    both = tuple(
        sample(rank, user=frame(9 if rank == once else 39, function="log" if rank == once else "step"))
        for rank in (0, 1)
        for once in (0, 0, 1, 1, 1, 2, 2)
    )
    assert main(deadline(rank_evidence(0), rank_evidence(1), samples=both)).ranks == (), "in other shares"
    unlike = tuple(replace(one, user_frame=frame(9, function="log")) if one.rank else one for one in samples)
    assert main(deadline(rank_evidence(0), rank_evidence(1), samples=unlike)).ranks == (0,)
    waits = tuple(replace(one, leaf=ALL_REDUCE) if one.rank else one for one in samples)
    assert main(deadline(rank_evidence(0), rank_evidence(1), samples=waits)).ranks == (0,)


LOOPS = """def step(batches):
    for batch in batches:
        for token in batch:
            read(token)
            mix(token)
        time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("lines", "loop_line", "cpu_s", "advice"),
    [
        ((41, 42, 43, 41), 40, 2.0, "a Python loop over tokens"),
        ((43, 43, 43, 41), 39, 0.1, "The named line sleeps"),
        ((41, 42, 41, 43), 40, 0.1, "what the named line reads, writes or waits for"),
    ],
    ids=["compute", "sleep", "wait"],
)
def test_the_time_of_a_loop_is_that_of_all_its_lines_and_the_advice_fits_what_it_does(
    lines: Sequence[int], loop_line: int, cpu_s: float, advice: str
) -> None:
    samples = tuple(
        replace(sample(0, user=frame(at)), at_s=10.0 + number, cpu_s=number * cpu_s / 3)
        for number, at in enumerate(lines)
    )
    sources = (Source(file=USER, first=38, text=LOOPS),)
    found = main(deadline(rank_evidence(0), samples=samples, sources=sources))
    assert hot_lines(found)[0][1:] == (loop_line, 75)
    assert advice in found.advice
    loader = frame(700, file=f"{SITE}/torch/utils/data/dataloader.py", function="_next_data")
    fetched = tuple(replace(one, leaf=loader) for one in samples)
    assert "more workers" in main(deadline(rank_evidence(0), samples=fetched, sources=sources)).advice


def test_a_run_at_its_deadline_that_was_seen_at_work_only_now_and_then_is_not_surely_slow() -> None:
    samples = (sample(1, user=frame(40)), *(sample(1, "waiting", user=frame(40)) for _ in range(8)))
    found = main(deadline(rank_evidence(1), samples=samples))
    assert (found.code, found.confidence) == ("slow", 0.5)
    assert found.facts["seldom_at_work"] == {"samples": 1, "of": 9}


@pytest.mark.parametrize(("last_s", "confidence"), [(11.0, 0.9), (10.0, 0.75)], ids=["as the others", "longer"])
def test_only_a_run_whose_steps_follow_each_other_is_surely_slow(last_s: float, confidence: float) -> None:
    """Steps of 4 s each; 20 or 21 s after the last one the run is ended."""
    working = board(mark("forward", step=4), steps_s=((1, last_s - 8), (2, last_s - 4), (3, last_s)))
    samples = tuple(sample(0, user=frame(39)) for _ in range(30))
    assert main(deadline(rank_evidence(0, status_file=working), samples=samples)).confidence == confidence


def test_of_a_run_that_may_be_in_its_first_step_for_ever_slow_is_only_likely() -> None:
    found = main(
        deadline(rank_evidence(0, status_file=board()), samples=tuple(sample(0, user=frame(39)) for _ in range(30)))
    )
    assert (found.code, found.confidence) == ("slow", 0.75)


SAMPLING = """def step(batches):
    while steps < 9:
        while True:
            group = draw()
            if group.varied:
                break
        loss(group).backward()
"""


@pytest.mark.parametrize(
    ("last_s", "second", "expected"),
    [(12.0, 41, 40), (12.0, 44, 9), (29.0, 41, 9)],
    ids=["stays in the loop", "left it once", "a step like the others"],
)
def test_a_step_that_may_never_end_is_in_the_while_loop_that_one_rank_does_not_leave(
    last_s: float, second: int, expected: int
) -> None:
    """The loop around it, in which the other rank waits for the gradients, is that of the training."""
    working = board(mark("forward", step=3), steps_s=((1, last_s - 0.2), (2, last_s - 0.1), (3, last_s)))
    draw = frame(9, function="draw")
    waits = rank_snapshot(1, BACKWARD, frame(44))
    seen = tuple(
        snapshot(number, 26.0 + number, rank_snapshot(0, draw, frame(at)), waits)
        for number, at in enumerate((41, second))
    )
    samples = tuple(sample(0, user=draw) for _ in range(30))
    sources = (Source(file=USER, first=38, text=SAMPLING),)
    ranks = rank_evidence(0, status_file=working), rank_evidence(1)
    found = main(deadline(*ranks, samples=samples, snapshots=seen, sources=sources))
    assert found.code == "slow"
    assert found.place is not None
    assert found.place.line == expected
    assert ("can ever become false" in found.advice) is (expected == 40)


def test_at_a_deadline_at_which_nobody_works_the_rank_that_all_others_wait_for_is_named() -> None:
    asleep = process(101, tasks=(task(101, syscall="clock_nanosleep", timed=True),))
    looks = stalled(in_all_reduce(0, collective(6)), rank_snapshot(1, frame(70), process=asleep))
    found = main(replace(looks, ending=Ending.DEADLINE))
    assert (found.code, found.ranks, found.confidence) == ("slow", (1,), 0.5)
    assert (found.facts["variant"], found.facts["blocked_in"]) == ("held up", "a sleep in step")
    assert found.place == line(70)


def test_a_slow_run_without_samples_names_nobody() -> None:
    found = main(deadline(rank_evidence(0)))
    assert short(found) == ("slow", (), None, ("watch.jsonl",))
    assert (found.facts["pace"], hot_lines(found)) == (None, [])
    assert found.confidence == 0.5


def test_a_deadline_that_was_not_written_down_is_still_a_slow_run() -> None:
    found = main(deadline(rank_evidence(0), limits=Limits(stall_s=5.0, busy_s=60.0, open_wait_s=300.0, start_s=120.0)))
    assert (found.code, found.confidence) == ("slow", 0.5)


def test_a_rank_that_died_before_the_deadline_explains_the_ranks_that_waited_until_then() -> None:
    assert cause(deadline(rank_evidence(0), left(1, 1, exception=raised(1)))) == "exception"
    assert cause(deadline(rank_evidence(0), left(1, -9))) == "killed"


# A rank that ended wrongly.


def test_an_exception_is_named_with_the_users_line_and_its_words() -> None:
    seen = evidence(left(0), left(1, 1, exception=raised(1), status_file=IN_BLOCK_2))
    found = diagnosed(seen)
    place = line(88, module="blocks.2.attn", layer=2)
    assert short(found.findings[0]) == ("exception", (1,), place, ("rank1/raised.json",))
    assert found.findings[0].claim == "rank 1 raised RuntimeError: boom (ada/train.py:88)"
    assert found.culprit == Culprit(ranks=(1,), step=3, collective=None, place=place)


def test_an_exception_in_an_unprobed_rank_without_frames_has_no_place() -> None:
    assert main(evidence(left(0, 1, exception=raised(0, frames=())))).place is None


IN_OURS = Frame(file=f"{SITE}/nsa_harness/nsa/model.py", line=3, function="<module>")


@pytest.mark.parametrize(
    ("message", "frames", "met"),
    [
        (
            f"cannot import name 'Net' from 'nsa_attention' ({SITE}/nsa_harness/nsa/__init__.py)",
            (frame(),),
            "nsa_harness",
        ),
        (
            f"cannot import name 'Net' from 'nsa_attention' ({SITE}/nsa_attention/__init__.py)",
            (frame(),),
            "nsa_attention",
        ),
        ("No module named 'nsa_harness.net'", (frame(),), "nsa_harness"),
        ("No module named 'flash'", (IN_OURS, frame()), "nsa_harness"),
        ("No module named 'nsa.net'", (frame(),), "nsa"),
        ("cannot import name 'Net' from 'nsa' (unknown location)", (frame(),), "nsa"),
        ("cannot import name 'go' from 'harness' (/home/ada/harness/__init__.py)", (frame(),), "harness"),
        ("No module named 'flash'", (IN_OURS,), None),
        ("No module named 'nsa_harness'", (frame(),), None),
        ("No module named 'nsa'", (frame(),), None),
        ("cannot import name 'Net' from 'nsalib' (/home/ada/nsalib.py)", (frame(),), None),
    ],
)
def test_an_import_that_met_a_package_of_ours_or_of_its_name_says_so(message, frames, met) -> None:
    found = main(evidence(left(0, 1, exception=raised(0, type="ImportError", message=message, frames=frames))))
    installed = met in ("nsa_harness", "nsa_attention")
    assert found.claim.endswith(f"; {met} is a package of nsa-harness") == installed
    assert ("from nsa_harness import run_one" in found.advice) == installed
    assert (f"Print `{met}.__path__`" in found.advice) == (met in ("nsa", "harness"))


def test_only_an_error_of_an_import_meets_a_package() -> None:
    text = f"{SITE}/nsa_harness/nsa/model.py says No module named 'nsa.net'"
    assert "nsa-harness" not in main(evidence(left(0, 1, exception=raised(0, message=text)))).advice


def test_a_rank_that_left_early_with_zero_is_named() -> None:
    lost = left(0, 1, exception=raised(0, message="Connection closed by peer", at_s=10.0))
    found = main(evidence(lost, left(1, 0, at_s=9.0, status_file=IN_BLOCK_2)))
    assert found.code == "early_exit"
    assert found.ranks == (1,)
    assert found.facts["last_seen"] == {"in": "forward", "name": "blocks.2.attn", "step": 3}


def test_the_line_the_beat_thread_saw_last_is_the_place_of_a_rank_that_cannot_be_asked() -> None:
    seen_last = board(mark("optimizer"), beat_s=29.5, heartbeat_frame=Frame(file=USER, line=61, function="step"))
    found = main(evidence(left(0, -9, status_file=seen_last)))
    assert found.place == line(61)
    assert (found.facts["last_seen"]["in"], found.facts["last_seen"]["step"]) == ("optimizer", 1)


@pytest.mark.parametrize(("status", "name"), [(-signal.SIGKILL, "SIGKILL"), (-signal.SIGTERM, "SIGTERM")])
def test_a_rank_that_somebody_killed_is_named(status: int, name: str) -> None:
    found = main(evidence(left(0, status, status_file=IN_BLOCK_2)))
    assert (found.code, found.ranks, found.proof) == ("killed", (0,), ("processes.jsonl",))
    assert (found.facts["signal"], found.facts["sender"], found.facts["watched"]) == (name, "", True)
    assert found.facts["last_seen"] == {"in": "forward", "name": "blocks.2.attn", "step": 3}
    assert main(evidence(left(0, status))).facts["last_seen"] == {"unseen": "no_progress"}


def test_a_killed_launcher_is_named_without_a_rank() -> None:
    found = main(evidence(rank_evidence(0), launcher=ended(None, -9)))
    assert short(found) == ("killed", (), None, ("processes.jsonl",))
    assert found.claim.startswith("the launcher was killed by SIGKILL")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (-signal.SIGSEGV, "segfault"),
        (-signal.SIGBUS, "segfault"),
        (-signal.SIGABRT, "aborted"),
        (-signal.SIGFPE, "aborted"),
    ],
)
def test_a_native_death_is_placed_by_the_stack_that_faulthandler_wrote(status: int, code: str) -> None:
    death = (stack(frame(3), thread="worker"), stack(frame(77)))
    assert short(main(evidence(left(0, status, death_stacks=death)))) == (code, (0,), line(77), ("rank0/stacks.txt",))


def test_a_native_death_without_a_stack_points_at_the_record_of_processes() -> None:
    assert short(main(evidence(left(0, -11)))) == ("segfault", (0,), None, ("processes.jsonl",))


def test_a_rank_that_chose_to_leave_with_a_code_is_a_bad_exit_with_its_last_words() -> None:
    found = main(evidence(left(0, 2, error_lines=("warn: Error 1", "usage: Error: no such option"))))
    assert short(found) == ("bad_exit", (0,), None, ("rank0/stderr.log",))
    assert found.facts["failure"] == "rank 0 ended with exit code 2"
    assert (found.facts["error_line"], found.facts["last_seen"]) == (
        "usage: Error: no such option",
        {"unseen": "no_progress"},
    )


# Nothing known: what was seen is said.


def test_a_collateral_abort_alone_has_no_known_cause() -> None:
    found = main(evidence(left(0, -6, error_lines=("Connection closed by peer",))))
    assert short(found) == ("unknown", (0,), None, ("output.log",))
    assert found.facts["failures"] == ["rank 0 was terminated by SIGABRT (Connection closed by peer)"]


@pytest.mark.parametrize(("statement", "is_told"), [("sys.exit(1)", True), ("dist.all_reduce(loss)", False)])
def test_an_exit_under_a_condition_is_told_with_the_condition_whatever_was_printed_last(
    statement: str, *, is_told: bool
) -> None:
    """The last recorded line may also be that of an earlier call."""
    text = f"def check(loss):\n    if not isfinite(loss):\n        {statement}\n"
    stopped = board(mark("exit", "atexit"), heartbeat_frame=frame(72, function="check"))
    one = rank_evidence(0, status_file=stopped, exit=ended(0, 1), error_lines=("UserWarning: old argument",))
    found = main(evidence(one, sources=(Source(file=USER, first=70, text=text),)))
    condition = {"text": "if not isfinite(loss)", "line": {"file": USER, "line": 71, "function": "check"}}
    assert found.facts["condition"] == (condition if is_told else None)
    assert ("under the condition `if not isfinite(loss)`" in found.claim) is is_told


def test_a_collateral_exception_or_exit_code_alone_has_no_known_cause() -> None:
    lost = raised(0, message="Connection closed by peer")
    assert cause(evidence(left(0, 1, exception=lost))) == "unknown"
    assert cause(evidence(left(0, 1, error_lines=("Connection closed by peer",)))) == "unknown"


def test_a_survivors_sigterm_is_not_named_for_the_end_of_a_rank_that_nobody_saw() -> None:
    found = main(evidence(left(0, -15, at_s=5.0), left(1, None, at_s=6.0), launcher=ended(None, 1)))
    assert short(found) == ("unknown", (1,), None, ("output.log",))
    assert found.facts["failures"] == ["rank 1 ended; nobody saw how", "rank 0 was terminated by SIGTERM"]


def test_a_launcher_that_failed_alone_has_no_known_cause() -> None:
    found = main(evidence(rank_evidence(0), launcher=ended(None, 2)))
    assert short(found) == ("unknown", (), None, ("output.log",))
    assert found.facts["failures"] == ["the launcher ended with exit code 2"]


def test_a_closed_wait_that_no_rule_knows_is_told_as_seen() -> None:
    found = main(stalled(in_all_reduce(0), in_all_reduce(1)))
    assert short(found) == ("unknown", (0, 1), line(40), ("output.log",))
    assert found.facts["waits"] == [{"rank": rank, "blocked_in": "all_reduce"} for rank in (0, 1)]
    assert found.confidence == 0.3


def test_nothing_seen_at_all_is_said_too() -> None:
    bare = case(deadline(rank_evidence(0)))
    assert finding_of(failures.unknown(bare)).claim == "cause not identified; observed: nothing"


def test_a_failure_beside_a_proven_wait_keeps_the_rules_of_hangs_out() -> None:
    blocked = stalled(locked_in_backward(0), ranks=(rank_evidence(0), left(1, 3)), exits=(ended(1, 3),))
    assert cause(blocked) == "bad_exit"
    stopped = rank_snapshot(0, process=process(100, state="T"))
    ranks = (rank_evidence(0), left(1, -6, error_lines=("Connection closed by peer",)))
    assert cause(stalled(stopped, ranks=ranks)) == "unknown"
    assert cause(stalled(locked_in_backward(0), ranks=ranks)) == "unknown"


def test_an_open_wait_of_unknown_kind_is_no_lock_no_loop_and_no_read() -> None:
    odd = rank_snapshot(0, BACKWARD, process=process(tasks=(task(syscall="futex_of_tomorrow"),)))
    found = main(stalled(odd, at_s=400.0))
    assert (found.code, found.ranks) == ("unknown", (0,))


# Open waits without end.


def sleeping(until_s: float | None) -> Evidence:
    facts = task(syscall="clock_nanosleep", wakes_at_s=until_s, timed=True)
    return stalled(rank_snapshot(0, frame(5), process=process(tasks=(facts,)), proof="dumps/rank0.2.txt"), at_s=400.0)


def test_a_sleep_past_the_deadline_is_named_with_its_line_and_its_end() -> None:
    found = main(sleeping(1000.0))
    assert short(found) == ("starved", (0,), line(5), ("dumps/rank0.2.txt",))
    assert (found.facts["until_s"], found.facts["missed_deadline_s"]) == (1000.0, 600.0)


def test_a_sleep_whose_end_cannot_be_read_is_named_without_it() -> None:
    assert main(sleeping(None)).facts["until_s"] is None


def test_a_read_that_brings_no_byte_is_named_with_its_line_and_its_length() -> None:
    reading = rank_snapshot(0, frame(6), process=process(tasks=(task(syscall="read"),)), proof="dumps/rank0.2.txt")
    found = main(stalled(reading, at_s=400.0))
    assert short(found) == ("blocked_io", (0,), line(6), ("dumps/rank0.2.txt",))
    assert (found.facts["blocked_in"], found.facts["no_progress_s"]) == ("read in step", 390.0)


# Debuggers.

PDB = (
    frame(126, file="/usr/lib/python3.11/cmd.py", function="Cmd.cmdloop"),
    frame(433, file="/usr/lib/python3.11/pdb.py", function="Pdb.interaction"),
    frame(90, file="/usr/lib/python3.11/bdb.py", function="Bdb.trace_dispatch"),
)
IPYTHON = (
    frame(1035, file=f"{SITE}/IPython/terminal/interactiveshell.py", function="TerminalInteractiveShell.interact"),
)
DEBUGPY = (
    frame(629, file="/usr/lib/python3.11/threading.py", function="Event.wait"),
    frame(981, file=f"{SITE}/debugpy/_vendored/pydevd/pydevd.py", function="PyDB.block_until_configuration_done"),
    frame(325, file=f"{SITE}/debugpy/server/api.py", function="wait_for_client_cls.__call__"),
)
ON_A_TERMINAL = task(syscall="read", target="/dev/pts/3")


def reading(*frames: Frame, waits: Task = ON_A_TERMINAL) -> RankSnapshot:
    return rank_snapshot(0, *frames, process=process(tasks=(waits,)), proof="dumps/rank0.2.txt")


@pytest.mark.parametrize(
    ("frames", "waits", "facts"),
    [
        (PDB, ON_A_TERMINAL, {"debugger": "pdb", "closed": False, "target": "/dev/pts/3"}),
        (IPYTHON, ON_A_TERMINAL, {"debugger": "IPython", "closed": False, "target": "/dev/pts/3"}),
        (DEBUGPY, task(timed=True), {"debugger": "debugpy", "closed": False, "target": ""}),
        (
            PDB,
            task(syscall="read", target="pipe:[7]", held_by=(100,)),
            {"debugger": "pdb", "closed": True, "target": ""},
        ),
    ],
    ids=["pdb", "IPython", "debugpy", "a pipe that nobody else holds"],
)
def test_a_rank_at_a_debuggers_prompt_is_named_with_the_line_where_it_stopped(
    frames: Sequence[Frame], waits: Task, facts: dict[str, object]
) -> None:
    found = main(stalled(reading(*frames, frame(6), waits=waits), at_s=400.0))
    assert (*short(found), found.facts) == ("debugger_waits", (0,), line(6), ("dumps/rank0.2.txt",), facts)
    assert found.confidence >= CERTAIN


@pytest.mark.parametrize(
    "frames",
    [(frame(6), *PDB), (PDB[0], frame(6)), (frame(6),)],
    ids=["below a debugger", "another prompt", "no prompt"],
)
def test_what_the_program_itself_reads_is_no_debuggers_prompt(frames: Sequence[Frame]) -> None:
    assert cause(stalled(reading(*frames), at_s=400.0)) == "blocked_io"


@pytest.mark.parametrize(
    ("pipe", "status"), [(False, Status.ERROR), (True, Status.HANG)], ids=["a terminal", "nothing reaches it"]
)
@pytest.mark.parametrize("mode", ["is_observed", "is_attached"])
def test_a_prompt_that_somebody_may_sit_at_is_no_hang_of_a_job_that_is_only_observed(
    mode: str, pipe: bool, status: Status
) -> None:
    waits = task(syscall="read", target="pipe:[7]", held_by=(100,)) if pipe else ON_A_TERMINAL
    assert judge(stalled(reading(*PDB, frame(6), waits=waits), at_s=4000.0, **{mode: True})).status is status


# Besides.


def traces(*names: str) -> RankTraces:
    return RankTraces(gradient_count=3, missing_count=len(names), missing_parameters=names, buckets=())


def test_parameters_without_a_gradient_are_a_finding_even_of_a_run_that_passed() -> None:
    seen = evidence(left(0, traces=traces("b.1.w", "a.0.w")), left(1), left(2, traces=traces("b.1.w")))
    found = diagnosed(seen)
    assert found.cause is None
    assert short(found.findings[0]) == (
        "no_gradient",
        (0, 2),
        Place(parameter="a.0.w", module="a.0", layer=0),
        ("traces.log",),
    )
    assert found.findings[0].claim == "2 parameters received no gradient: a.0.w, b.1.w"


def test_of_many_parameters_without_a_gradient_three_are_shown() -> None:
    seen = evidence(left(0, traces=traces("a", "b", "c", "d", "e")))
    assert main(seen).claim == "5 parameters received no gradient: a, b, c and 2 more"
    assert main(seen).place == Place(parameter="a", module=None, layer=None)


def test_processes_that_outlived_the_run_are_a_finding_beside_the_cause() -> None:
    seen = evidence(left(0, 2), leftovers=("17 sleep 600", "18 sleep 601"))
    assert [one.code for one in diagnosed(seen).findings] == ["bad_exit", "orphan_process"]
    facts = diagnosed(seen).findings[1].facts
    assert (facts["processes"], facts["left_alone"]) == (["17 sleep 600", "18 sleep 601"], False)


def test_processes_that_could_not_be_ended_are_named() -> None:
    seen = evidence(
        left(0, 2), unkillable=("17 sleep 600 (of bob; may not be signalled)",), leftovers=("18 sleep 601",)
    )
    assert diagnosed(seen).findings[1].claim == (
        "1 process of the run could not be ended: 17 sleep 600 (of bob; may not be signalled)"
    )


# Every rule is reached.


def test_every_rule_has_a_run_above_that_it_answers() -> None:
    reached = {
        cause(seen)
        for seen in (
            evidence(ending=Ending.CONTROLLER_DIED, launcher=None),
            deadline(rank_evidence(0)),
            evidence(left(0, 1, exception=raised(0))),
            stalled(*CROSSED, ranks=skipping()),
            stalled(in_all_reduce(0, collective(6)), exits=(ended(1, 0, at_s=9.0),)),
            evidence(left(0, -9)),
            evidence(left(0, -11)),
            evidence(left(0, 2)),
            stalled(rank_snapshot(0, process=process(100, state="T"))),
            stalled(locked_in_backward(0)),
            stalled(rank_snapshot(0, frame(12))),
            spinning(39),
            sleeping(None),
            stalled(rank_snapshot(0, process=process(tasks=(task(syscall="read"),))), at_s=400.0),
        )
    }
    module = failures.__name__
    assert len(reached) >= len([rule for rules in RULES.values() for rule in rules if rule.__module__ == module])


@pytest.mark.parametrize(
    ("module", "layer"), [("blocks.7.attn", 7), ("7", 7), ("h.0", 0), ("fc1.x", None), ("", None), (None, None)]
)
def test_the_layer_is_the_first_number_of_a_module_name(module: str | None, layer: int | None) -> None:
    assert layer_of(module) == layer


def test_a_long_claim_is_one_line_and_cut() -> None:
    assert shorten("a\n  b") == "a b"
    assert shorten("x" * 300) == "x" * 199 + "…"
    assert shorten("x" * 200) == "x" * 200
