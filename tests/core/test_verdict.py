"""What happened, from the evidence alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import (
    board,
    collective,
    ended,
    evidence,
    frame,
    in_all_reduce,
    locked_in_backward,
    process,
    raised,
    rank_evidence,
    rank_snapshot,
    stack,
    stalled,
    task,
)
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.evidence.evidence import Ending, Evidence, RankEvidence
from nsa_harness.core.evidence.host import SentSignal
from nsa_harness.core.report import Status
from nsa_harness.core.verdict.proof import prove
from nsa_harness.core.verdict.verdict import Failure, FailureKind, Judgement, exit_text, judge, pass_reason
from nsa_harness.core.verdict.wait import WaitKind

CROSSED = (in_all_reduce(0, collective(6)), in_all_reduce(1, collective(6, "broadcast")))
GLOO_LOST = "RuntimeError: [../gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"


def left(
    rank: int, status: int | None = 0, *, at_s: float = 30.0, by_us: bool = False, **changes: object
) -> RankEvidence:
    return rank_evidence(rank, exit=ended(rank, status, at_s=at_s, by_us=by_us), **changes)


def blamed(seen: Evidence) -> list[tuple[int | None, FailureKind, bool]]:
    return [(one.rank, one.kind, one.is_collateral) for one in judge(seen).failures]


def test_a_run_whose_ranks_all_ended_with_zero_passes() -> None:
    shown = "every rank ended with exit code 0"
    assert judge(evidence(left(0), left(1))) == Judgement(
        status=Status.PASS, failures=(), proof=None, pass_reason=shown
    )
    # Ranks that ended well before others took their place.
    restarted = evidence(left(0), left(1), ending=Ending.RESTARTED, launcher=None)
    assert judge(restarted).status is Status.PASS


def test_a_launcher_that_fails_with_its_ranks_vouches_for_those_whose_exit_nobody_saw() -> None:
    seen = evidence(left(0), left(1, None), rank_evidence(2))
    assert pass_reason(seen) == "the launcher ended with exit code 0; exit of ranks 1, 2 not seen"
    assert judge(seen).status is Status.PASS
    assert pass_reason(replace(seen, ending=Ending.RESTARTED, launcher=None)) is None


def test_a_program_that_started_the_ranks_itself_vouches_for_none_of_them() -> None:
    reached = board(exit_s=29.0)
    seen = evidence(left(0), left(1, None), launcher_reports_ranks=False)
    judgement = judge(seen)
    assert (judgement.status, judgement.pass_reason) == (Status.ERROR, None)
    assert judgement.error == "the command ended with exit code 0, and nobody saw how rank 1 ended"
    # Its interpreter came to its end, and no exception left it.
    reached_its_end = replace(seen, ranks=(seen.ranks[0], replace(seen.ranks[1], status_file=reached)))
    assert judge(reached_its_end).pass_reason == "the command ended with exit code 0; exit of rank 1 not seen"


def test_a_watched_command_that_had_no_rank_says_so() -> None:
    assert (
        judge(evidence(rank_evidence(0, pid=None), is_observed=True)).pass_reason
        == "the command ended with exit code 0; no rank was seen"
    )


def test_a_launch_of_which_a_rank_was_never_seen_does_not_pass() -> None:
    judgement = judge(evidence(left(0), rank_evidence(1, pid=None)))
    assert (judgement.status, judgement.error) == (
        Status.ERROR,
        "the command ended with exit code 0, and no process of rank 1 was seen",
    )
    alone = evidence(rank_evidence(0, pid=None), launcher_reports_ranks=False)  # a program without torch
    assert judge(alone).status is Status.PASS
    # torchrun makes a log file for each rank that it starts; a short one may end before anybody looks.
    assert judge(evidence(left(0), rank_evidence(1, pid=None, has_log=True))).status is Status.PASS


@pytest.mark.parametrize(("uncaught", "verdict"), [(True, Status.FAIL), (False, Status.PASS)])
def test_a_rank_whose_atexit_handler_hides_an_uncaught_exception_fails(uncaught: bool, verdict: Status) -> None:
    error = raised(1, "ValueError", "loss is nan", is_uncaught=uncaught)
    assert judge(evidence(left(0), left(1, exception=error))).status is verdict


# Not judged is ERROR, never PASS and never FAIL.


def test_a_launcher_that_could_not_start_is_an_error_of_the_harness() -> None:
    seen = evidence(ending=Ending.NOT_LAUNCHED, launcher=None, launcher_error="No such file: torchrun")
    assert judge(seen) == Judgement(status=Status.ERROR, failures=(), proof=None, error="No such file: torchrun")


def test_a_launcher_that_did_not_start_for_a_reason_nobody_wrote_down_is_an_error_too() -> None:
    judgement = judge(evidence(ending=Ending.NOT_LAUNCHED, launcher=None))
    assert judgement == Judgement(
        status=Status.ERROR, failures=(), proof=None, error="the launcher could not be started"
    )


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        (Ending.INTERRUPTED, "interrupted before it ended"),
        (Ending.CONTROLLER_DIED, "the harness died before the run ended; its guardian ended the run"),
    ],
)
def test_a_run_that_was_cut_short_is_an_error_that_says_why(ending: Ending, error: str) -> None:
    seen = evidence(left(0, -15, by_us=True), ending=ending, launcher=ended(None, 1, by_us=True))
    assert judge(seen) == Judgement(status=Status.ERROR, failures=(), proof=None, error=error)


@pytest.mark.parametrize(
    ("undead", "then"),
    [
        ((), "its guardian ended the run"),
        (None, "nothing shows that its guardian ended the run"),
        (("7 sleep 600 (of bob; may not be signalled)",),
         "its guardian could not end all of it: 7 sleep 600 (of bob; may not be signalled)"),
    ],
)  # fmt: skip
def test_what_a_guardian_did_for_a_dead_harness_is_said_as_far_as_it_was_seen(
    undead: tuple[str, ...] | None, then: str
) -> None:
    seen = evidence(ending=Ending.CONTROLLER_DIED, unkillable=undead)
    assert judge(seen).error == f"the harness died before the run ended; {then}"


NOBODY_SAW = "nobody saw how the run ended: the record of its processes is missing"


def test_a_run_whose_end_nobody_saw_is_an_error() -> None:
    assert judge(evidence(left(0), launcher=None)).error == NOBODY_SAW


@pytest.mark.parametrize("launcher", [ended(None, None), ended(None, -15, by_us=True)])
def test_a_launcher_that_did_not_end_by_itself_or_not_in_sight_proves_no_pass(launcher: object) -> None:
    seen = evidence(rank_evidence(0), launcher=launcher)
    assert judge(seen) == Judgement(status=Status.ERROR, failures=(), proof=None, error=NOBODY_SAW)


def test_a_stall_that_the_evidence_does_not_prove_is_an_error() -> None:
    error = "the run was ended as a stall, and the evidence on disk does not prove one"
    assert judge(stalled()) == Judgement(status=Status.ERROR, failures=(), proof=None, error=error)
    reading = rank_snapshot(0, frame(6), process=process(tasks=(task(syscall="read"),)))
    assert judge(stalled(reading)).error == error
    assert judge(stalled(*CROSSED, snapshots=())).error == error


# HANG.


def test_a_proven_stall_is_a_hang() -> None:
    seen = stalled(*CROSSED)
    proof = prove(seen.snapshots, (), last_progress_s=10.0, limits=seen.limits, backend="gloo")
    assert proof is not None
    assert judge(seen) == Judgement(status=Status.HANG, failures=(), proof=proof)


def test_ranks_that_we_ended_are_not_gone_in_the_proof() -> None:
    seen = stalled(*CROSSED, exits=(ended(0, -15, by_us=True), ended(1, -15, by_us=True)))
    proof = judge(seen).proof
    assert proof is not None
    assert [(root.rank, root.kind) for root in proof.graph.roots] == [
        (0, WaitKind.COLLECTIVE),
        (1, WaitKind.COLLECTIVE),
    ]


def test_a_rank_that_died_goes_before_the_hang_of_those_that_wait_for_it() -> None:
    seen = stalled(
        in_all_reduce(0, collective(6)),
        ranks=(rank_evidence(0), left(1, -9, at_s=9.0)),
        exits=(ended(1, -9, at_s=9.0),),
    )
    judgement = judge(seen)
    assert (judgement.status, blamed(seen)) == (Status.FAIL, [(1, FailureKind.SIGNAL, False)])
    assert judgement.proof is not None, "who waits for whom is still told"


def test_a_rank_that_left_with_zero_while_the_others_stalled_is_the_failure() -> None:
    seen = stalled(in_all_reduce(0, collective(6)), exits=(ended(1, 0, at_s=9.0),))
    assert judge(seen).status is Status.FAIL
    assert judge(seen).failures == (
        Failure(
            kind=FailureKind.LEFT,
            rank=1,
            at_s=9.0,
            text="rank 1 ended with exit code 0 while the others still needed it",
            is_collateral=False,
            status=0,
        ),
    )


def test_a_rank_that_left_with_zero_fails_nobody_who_waits_for_something_of_his_own() -> None:
    """A lock that no thread holds: it would wait as well if the other rank were there."""
    seen = stalled(rank_snapshot(0, frame(30)), exits=(ended(1, 0, at_s=9.0),))
    judgement = judge(seen)
    assert (judgement.status, judgement.failures) == (Status.HANG, ())


# FAIL.


def test_a_run_still_there_at_its_deadline_fails_and_is_never_a_hang() -> None:
    seen = stalled(*CROSSED, ending=Ending.DEADLINE)
    assert judge(seen) == Judgement(status=Status.FAIL, failures=(), proof=None)


def test_a_rank_that_raised_fails_with_its_words() -> None:
    trace = raised(1)
    assert judge(evidence(left(0), left(1, 1, exception=trace))).failures == (
        Failure(
            kind=FailureKind.RAISED,
            rank=1,
            at_s=9.0,
            text="RuntimeError: boom",
            is_collateral=False,
            status=1,
            exception=trace,
        ),
    )


def test_an_exception_without_a_time_happened_when_its_rank_ended() -> None:
    seen = evidence(left(0, 1, exception=raised(0, at_s=None), at_s=12.0), left(1, 1, exception=raised(1, at_s=11.0)))
    assert [(one.rank, one.at_s) for one in judge(seen).failures] == [(1, 11.0), (0, 12.0)]
    unseen = evidence(rank_evidence(0, exception=raised(0, at_s=None)))
    assert judge(unseen).failures[0].at_s == 0.0


def test_an_exception_that_the_program_survived_is_no_failure() -> None:
    assert judge(evidence(left(0, 0, exception=raised(0)))).status is Status.PASS


def test_an_exception_that_was_only_printed_before_a_signal_came_did_not_end_the_rank() -> None:
    """A program that logs what it caught prints a traceback too."""
    printed = raised(0, at_s=None, proof="rank0/stderr.log")
    assert blamed(evidence(left(0, -9, exception=printed), left(1, 0))) == [(0, FailureKind.SIGNAL, False)]


def test_an_exception_in_a_rank_that_we_ended_is_no_failure() -> None:
    seen = stalled(*CROSSED, ranks=(left(0, -15, by_us=True, exception=raised(0)), rank_evidence(1)))
    assert judge(seen).status is Status.HANG


def test_the_first_failure_in_time_explains_the_others() -> None:
    seen = evidence(left(0, 1, at_s=11.0), left(1, 1, at_s=10.0), left(2, 1, at_s=12.0))
    assert blamed(seen) == [(rank, FailureKind.CODE, False) for rank in (1, 0, 2)]


@pytest.mark.parametrize(
    "message",
    [
        "Connection closed by peer [127.0.0.1]",
        "Connection reset by peer",
        "Socket closed",
        "Socket unexpectedly closed",
        "Timed out waiting 1800000ms",
        "Broken pipe",
        "failed to recv, got 0 bytes",
        "Connection refused",
    ],
)
def test_a_rank_that_lost_its_connection_is_a_consequence_even_when_it_fell_first(message: str) -> None:
    seen = evidence(left(0, 1, exception=raised(0, message=message, at_s=5.0)), left(1, -9, at_s=8.0))
    assert blamed(seen) == [(1, FailureKind.SIGNAL, False), (0, FailureKind.RAISED, True)]


@pytest.mark.parametrize(
    "line",
    [
        GLOO_LOST,
        "what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 512 vs 4",
        "Received data size doesn't match expected size",
    ],
)
def test_a_rank_that_aborts_because_of_another_one_is_a_consequence(line: str) -> None:
    assert blamed(evidence(left(0, -6, error_lines=(line,)))) == [(0, FailureKind.SIGNAL, True)]
    assert blamed(evidence(left(0, -6, error_lines=("CUDA error",)))) == [(0, FailureKind.SIGNAL, False)]


# Without stderr, as under `watch`: gloo's thread aborts the rank while its main thread waits in a collective.
WRAPPER = frame(114, file="/site/nsa_harness/probe/patches.py", function="call_original")
IN_ALL_REDUCE = stack(WRAPPER, frame(3252, file="/torch/distributed/distributed_c10d.py", function="all_reduce"))


def test_an_abort_out_of_a_collective_is_a_consequence_where_no_message_is_known() -> None:
    aborted = left(0, -6, death_stacks=(stack(frame(9)), IN_ALL_REDUCE), died_in_native_thread=True)
    assert blamed(evidence(aborted)) == [(0, FailureKind.SIGNAL, True)]


@pytest.mark.parametrize(
    "changes",
    [
        {"died_in_native_thread": False},
        {"error_lines": ("what():  std::bad_alloc",)},
        {"death_stacks": (IN_ALL_REDUCE, stack(frame(9)))},
        {"death_stacks": ()},
        {"exit": ended(0, -11)},
    ],
    ids=["by its own thread", "with a message", "outside of a collective", "without a stack", "by a segfault"],
)
def test_any_other_fatal_signal_is_a_failure_of_the_rank(changes: dict[str, Any]) -> None:
    facts = {"death_stacks": (IN_ALL_REDUCE,), "died_in_native_thread": True, **changes}
    assert blamed(evidence(replace(left(0, -6), **facts))) == [(0, FailureKind.SIGNAL, False)]


def test_a_rank_that_torchrun_terminated_is_a_consequence() -> None:
    seen = evidence(left(0, -15, at_s=5.0), left(1, 3, at_s=6.0))
    assert blamed(seen) == [(1, FailureKind.CODE, False), (0, FailureKind.SIGNAL, True)]


@pytest.mark.parametrize("asked", [-15, 143])
@pytest.mark.parametrize("gone", [left(1, None, at_s=6.0), rank_evidence(1, pid=None)])
def test_a_rank_whose_end_nobody_saw_goes_before_those_that_were_asked_to_end(gone: RankEvidence, asked: int) -> None:
    seen = evidence(left(0, asked, at_s=5.0), gone, launcher=ended(None, 1))
    assert blamed(seen) == [(1, FailureKind.UNSEEN, False), (0, blamed(seen)[1][1], True)]
    assert judge(seen).failures[0].text == "rank 1 ended; nobody saw how"


def test_where_the_whole_job_was_asked_to_end_or_a_rank_failed_by_itself_nobody_unseen_is_blamed() -> None:
    job = SentSignal(pid=0, rank=None, signal="SIGTERM", sender="Slurm", at_s=None)
    cancelled = evidence(left(0, -15), left(1, None), launcher=ended(None, 1), signals=(job,))
    assert blamed(cancelled) == [(0, FailureKind.SIGNAL, True)]
    assert blamed(evidence(left(0, -15), left(1, None), left(2, 3))) == [
        (2, FailureKind.CODE, False),
        (0, FailureKind.SIGNAL, True),
    ]


def test_a_rank_that_we_ended_is_not_blamed() -> None:
    seen = evidence(left(0, -9, by_us=True), left(1, 2))
    assert blamed(seen) == [(1, FailureKind.CODE, False)]


def test_a_rank_whose_end_nobody_saw_is_not_blamed() -> None:
    assert judge(evidence(left(0, None), left(1))).failures == ()


def test_a_rank_that_left_before_the_others_lost_it_is_the_first_failure() -> None:
    seen = evidence(
        left(0, 1, exception=raised(0, message="Connection closed by peer", at_s=10.0)), left(1, 0, at_s=9.0)
    )
    assert blamed(seen) == [(1, FailureKind.LEFT, False), (0, FailureKind.RAISED, True)]


def test_a_rank_that_left_after_the_failure_or_beside_a_real_one_is_innocent() -> None:
    lost = left(0, 1, exception=raised(0, message="Connection closed by peer", at_s=10.0))
    assert blamed(evidence(lost, left(1, 0, at_s=11.0))) == [(0, FailureKind.RAISED, True)]
    real = left(0, 1, exception=raised(0, at_s=10.0))
    assert blamed(evidence(real, left(1, 0, at_s=9.0))) == [(0, FailureKind.RAISED, False)]


def test_a_launcher_that_fails_alone_is_named() -> None:
    assert judge(evidence(left(0), launcher=ended(None, 2, at_s=4.0))).failures == (
        Failure(
            kind=FailureKind.LAUNCHER,
            rank=None,
            at_s=4.0,
            text="the launcher ended with exit code 2",
            is_collateral=False,
            status=2,
        ),
    )


def test_a_launcher_that_reports_its_ranks_failure_adds_nothing() -> None:
    seen = evidence(left(0, 3), launcher=ended(None, 1))
    assert blamed(seen) == [(0, FailureKind.CODE, False)]


def test_a_launcher_that_we_ended_is_no_failure() -> None:
    seen = stalled(*CROSSED, launcher=ended(None, 1, by_us=True))
    assert judge(seen).failures == ()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "ended; nobody saw how"),
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was terminated by SIGKILL"),
        (-64, "was terminated by SIGRTMAX"),
        (-99, "was terminated by signal 99"),
    ],
)
def test_how_a_process_ended_in_words(status: int | None, words: str) -> None:
    assert exit_text(status) == words


_RANKS = st.builds(
    lambda status, at_s, by_us, broke: (status, at_s, by_us, broke),
    st.sampled_from([None, 0, 1, -9, -15, -6]),
    st.floats(0, 100),
    st.booleans(),
    st.sampled_from([None, "boom", "Connection reset by peer"]),
)


@given(
    st.lists(_RANKS, max_size=3),
    st.sampled_from(list(Ending)),
    st.none()
    | st.builds(lambda status, by_us: ended(None, status, by_us=by_us), st.sampled_from([None, 0, 1]), st.booleans()),
    st.sampled_from([(), CROSSED, (locked_in_backward(0),)]),
)
def test_every_evidence_is_judged_and_only_a_clean_end_passes(
    ranks: list[tuple[int | None, float, bool, str | None]], ending: Ending, launcher: object, looks: tuple[object, ...]
) -> None:
    known = [
        left(n, status, at_s=at_s, by_us=by_us, exception=raised(n, message=broke) if broke else None)
        for n, (status, at_s, by_us, broke) in enumerate(ranks)
    ]
    seen = stalled(
        *looks,  # type: ignore[arg-type]
        ending=ending,
        launcher=launcher,
        ranks=tuple(known),
        exits=tuple(one.exit for one in known),
    )
    judgement = judge(seen)
    assert (judgement.error is not None) == (judgement.status is Status.ERROR)
    if judgement.status is Status.PASS:
        assert ending in (Ending.EXITED, Ending.RESTARTED)
        assert launcher == ended(None, 0)
        assert all(one.exit.status in (0, None) or one.exit.during_teardown for one in known)  # type: ignore[union-attr]
    if judgement.status is Status.HANG:
        assert ending in (Ending.STALL, Ending.POST_MORTEM)
        assert judgement.proof is not None
    assert list(judgement.failures) == sorted(judgement.failures, key=lambda one: (one.is_collateral, one.at_s))
