"""Waits that a search has seen before: which are the same, when that is enough, and what the rest of a search takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bisected import BAD, GOOD
from builders import ALL_REDUCE, LIMITS, collective, frame, in_all_reduce, process, rank_snapshot, snapshot, stack, task

from nsa_harness.core.evidence.evidence import RankSnapshot, Sample
from nsa_harness.core.search.effort import ProbeCosts, Stage, costs, time_left_s, worst_case_stages
from nsa_harness.core.search.question import ProbeResult, Purpose, QuestionKind, Round, SearchQuestion, spans_of
from nsa_harness.core.search.report import ProbeReport
from nsa_harness.core.search.waits import (
    OpenWait,
    Waiting,
    early_after_s,
    open_wait,
    proof_after_s,
    seen_before,
    stall_after_s,
    waiting_for,
)
from nsa_harness.core.verdict.wait import WaitKind

READ = {"syscall": "recvfrom", "target": "socket:[7]"}
FORK = "/home/ada/venv/harness/fork_server/server.py"


def receiving(rank: int = 1, line: int = 13, *around: Any, **changes: Any) -> RankSnapshot:
    """Rank 1 reads from a socket, which nothing says will never be written to."""
    pid = 100 + rank
    facts = process(pid, tasks=(task(pid, **READ),), **changes)
    lines = (frame(line, file="/job/loader.py", function="load"), frame(70, function="<module>"), *around)
    return rank_snapshot(rank, process=facts, stacks=(stack(*lines, tid=pid),))


def seen(
    *ranks: RankSnapshot, quiet_s: float = 30.0, world: int = 2, samples: tuple[Sample, ...] = ()
) -> OpenWait | None:
    looks = (snapshot(1, 98.0, *ranks), snapshot(2, 100.0, *ranks))
    return open_wait(looks, samples, last_progress_s=100.0 - quiet_s, limits=LIMITS, backend="gloo", ranks=world)


VICTIM = in_all_reduce(0, collective(3))


def known() -> OpenWait:
    found = seen(VICTIM, receiving())
    assert found is not None
    assert found.signature is not None
    return found


def test_what_every_rank_stands_in_is_the_signature_of_a_wait() -> None:
    found = known()
    assert found.signature is not None
    assert [(one.rank, one.kind) for one in found.signature] == [(0, WaitKind.COLLECTIVE), (1, WaitKind.IO)]
    assert found.signature[1].stack == ("loader.py:13 load", "train.py:70 <module>")
    assert (found.no_progress_s, found.until_s, found.limit) == (30.0, 300.0, "open_wait_s")


def test_a_fork_and_torchrun_show_the_same_wait_and_so_does_another_checkout() -> None:
    forked = receiving(1, 13, frame(88, file="<frozen runpy>", function="_run_code"), frame(27, file=FORK))
    elsewhere = (frame(13, file="/b/loader.py", function="load"), frame(70, function="<module>"))
    moved = replace(receiving(), stacks=(stack(*elsewhere, tid=101),))
    for other in (forked, moved):
        again = seen(VICTIM, other)
        assert again is not None
        assert again.signature == known().signature


def test_another_collective_of_the_same_line_is_the_same_wait() -> None:
    later = seen(in_all_reduce(0, collective(9)), receiving())
    assert later is not None
    assert later.signature == known().signature


@pytest.mark.parametrize(
    "ranks",
    [
        (VICTIM, receiving(line=14)),
        (rank_snapshot(0, ALL_REDUCE, frame(41), collectives=(collective(3),)), receiving()),
        (receiving(0), receiving()),
    ],
)
def test_a_rank_on_another_line_or_in_another_wait_makes_another_signature(ranks: tuple[RankSnapshot, ...]) -> None:
    other = seen(*ranks)
    assert other is not None
    assert other.signature != known().signature


def test_nothing_is_known_of_a_wait_in_which_a_rank_is_missing() -> None:
    found = seen(VICTIM, receiving(), world=3)
    assert found is not None
    assert found.signature is None


def test_a_rank_that_moves_or_one_look_alone_is_no_wait() -> None:
    moved = receiving(io_bytes=10**6)
    looks = (snapshot(1, 98.0, VICTIM, receiving()), snapshot(2, 100.0, VICTIM, moved))
    facts: dict[str, Any] = {"last_progress_s": 0.0, "limits": LIMITS, "backend": "gloo", "ranks": 2}
    assert open_wait(looks, (), **facts) is None
    assert open_wait(looks[:1], (), **facts) is None


def test_a_wait_that_nothing_can_end_is_left_to_its_proof() -> None:
    locked = rank_snapshot(1, frame(13), process=process(101, tasks=(task(101),)))
    assert seen(VICTIM, locked) is None


def test_a_computation_on_one_line_is_never_taken_for_one_seen_before() -> None:
    def burning(at_s: float) -> RankSnapshot:
        own = task(101, cpu_s=at_s, state="R", syscall="running")
        return rank_snapshot(1, frame(13), process=process(101, cpu_s=at_s, tasks=(own,)))

    looks = tuple(snapshot(number, at_s, VICTIM, burning(at_s)) for number, at_s in ((1, 98.0), (2, 100.0)))
    found = open_wait(looks, (), last_progress_s=70.0, limits=LIMITS, backend="gloo", ranks=2)
    assert found is not None
    assert (found.signature, found.limit) == (None, "busy_s")


@pytest.mark.parametrize(
    ("quiet_s", "longest_quiet_s", "enough"),
    [
        (9.9, 0.2, False),
        (10.0, 0.2, True),  # the floor
        (39.0, 4.0, False),  # a program that is quiet for long when all is well
        (40.0, 4.0, True),
        (400.0, None, False),  # nobody saw how quiet it is when all is well
    ],
)
def test_a_wait_seen_before_is_enough_after_ten_times_what_the_good_control_was_quiet(
    quiet_s: float, longest_quiet_s: float | None, enough: bool
) -> None:
    now = known()
    assert seen_before(replace(now, no_progress_s=quiet_s), {now.signature}, longest_quiet_s) is enough  # type: ignore[arg-type]


def test_a_wait_that_was_never_proven_is_waited_for_however_long() -> None:
    now = replace(known(), no_progress_s=4000.0)
    assert not seen_before(now, set(), 0.2)
    assert not seen_before(replace(now, until_s=None), {now.signature}, 0.2)  # type: ignore[arg-type]  # a sleep
    assert not seen_before(replace(now, signature=None), {known().signature}, 0.2)  # type: ignore[arg-type]


def test_the_healthy_twin_that_stands_on_the_same_lines_is_left_alone_while_its_bytes_come() -> None:
    trickles = Sample(rank=1, at_s=95.0, motion="moving", leaf=None, user_frame=None, cpu_s=1.0)
    slow = seen(VICTIM, receiving(), quiet_s=60.0, samples=(trickles,))
    assert slow is not None
    assert slow.signature == known().signature
    assert slow.no_progress_s == 5.0
    assert not seen_before(slow, {known().signature}, 0.2)  # type: ignore[arg-type]


def test_what_the_good_control_teaches_has_a_floor_and_a_proof_is_never_longer_than_that_of_any_run() -> None:
    assert [stall_after_s(quiet_s) for quiet_s in (0.1, 2.0)] == [2.0, 6.0]
    assert [early_after_s(quiet_s) for quiet_s in (0.1, 2.0)] == [10.0, 20.0]
    assert [proof_after_s(quiet_s) for quiet_s in (0.1, 4.0, 40.0)] == [60.0, 80.0, 300.0]


def test_who_looks_on_is_told_until_when_it_is_waited() -> None:
    now = known()
    assert waiting_for(now, set(), 0.2) == Waiting(
        no_progress_s=30.0, until_s=300.0, was_proven=False, limit="open_wait_s"
    )
    again = waiting_for(now, {now.signature}, 0.2)  # type: ignore[arg-type]
    assert (again.was_proven, again.until_s, again.left_s) == (True, 10.0, -20.0)
    assert not waiting_for(now, {now.signature}, None).was_proven  # type: ignore[arg-type]  # a proof in full


def probe(purpose: Purpose, counts_as: ProbeResult, wall_s: float, *, early: bool = False) -> ProbeReport:
    return ProbeReport(
        n=1, subset=spans_of({1}), purpose=purpose, open=(0, 8), left=0, in_full=False, launcher="fork", verdict=None,
        kind=None, cause=None, summary="", place=None, culprits=(), phase=None, counts_as=counts_as, wall_s=wall_s,
        longest_quiet_s=None, dir=None, spec_hash=None, early=early,
    )  # fmt: skip


CONTROLS = (probe(Purpose.CONTROL_GOOD, GOOD, 2.0), probe(Purpose.CONTROL_BAD, BAD, 62.0))


def test_what_a_probe_takes_is_known_once_both_ends_were_seen() -> None:
    assert costs(CONTROLS[:1], None) is None
    assert costs(CONTROLS, None) == ProbeCosts(good_s=2.0, bad_s=62.0, proof_s=62.0)
    assert costs(CONTROLS, 10.0) == ProbeCosts(good_s=2.0, bad_s=12.0, proof_s=62.0)
    early = probe(Purpose.RIGHT_EDGE, BAD, 15.0, early=True)
    assert costs((*CONTROLS, early), 10.0) == ProbeCosts(good_s=2.0, bad_s=15.0, proof_s=62.0)


STAGES = (
    Stage(name="controls", probes=2),
    Stage(name="right edge", probes=3),
    Stage(name="left edge", probes=3),
    Stage(name="special sets", probes=4),
    Stage(name="proof", probes=8),
    Stage(name="controls again", probes=2),
    Stage(name="next culprit", probes=40, only_if="there are several culprits"),
)
EACH = ProbeCosts(good_s=2.0, bad_s=12.0, proof_s=62.0)


def left_s(purpose: Purpose, left: int, *made: ProbeReport) -> float:
    running = Round(subsets=(frozenset({1}),), purpose=purpose, open=(0, 8), probes_left=left)
    return time_left_s(STAGES, (*CONTROLS, *made), running, EACH, 1)


def test_the_time_that_is_left_is_that_of_the_whole_search() -> None:
    edges, shape, proof, ends = 3 * 7.0 + 1.5 * 7.0, 2 * 7.0, 4 * 2.0 + 62.0, 14.0
    assert left_s(Purpose.RIGHT_EDGE, 2) == edges + shape + proof + ends
    made = [probe(Purpose.RIGHT_EDGE, GOOD, 2.0)] * 2
    assert left_s(Purpose.RIGHT_EDGE, 0, *made) == 7.0 + 1.5 * 7.0 + shape + proof + ends
    assert left_s(Purpose.DROP_ONE, 0, *[probe(Purpose.DROP_ONE, GOOD, 2.0)] * 6) == 2.0 + 62.0 + ends
    proven = (probe(Purpose.PROOF_BAD, BAD, 62.0), probe(Purpose.RECHECK_GOOD, GOOD, 2.0))
    assert left_s(Purpose.RECHECK_BAD, 0, *proven) == 7.0


def test_each_value_of_a_choice_is_still_to_come() -> None:
    stages = worst_case_stages(SearchQuestion(kind=QuestionKind.CHOICE, items=4))
    running = Round(subsets=(frozenset({0}),), purpose=Purpose.EACH, open=(0, 4), probes_left=0)
    made = [probe(Purpose.EACH, GOOD, 2.0)] * 4
    assert time_left_s(stages, (), running, EACH, 1) - time_left_s(stages, made, running, EACH, 1) == 3 * 7.0
