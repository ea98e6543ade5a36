"""What a run comes to: the outcome, its numbers, the exit code, and the words for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import (
    UNTRACED,
    board,
    call,
    collective,
    ended,
    evidence,
    frame,
    in_all_reduce,
    locked_in_backward,
    mark,
    process,
    raised,
    rank_evidence,
    rank_snapshot,
    spec,
    stalled,
    task,
)
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.commands.judge import judge_evidence
from nsa_harness.core.comparison.severity import strict_exit_code
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.evidence.evidence import Collective, Ending, Evidence, RankEvidence
from nsa_harness.core.evidence.gradients import RankTraces
from nsa_harness.core.outcome.outcome import ruled_out_causes, skipped_outcome, summarize_rank, unjudged_outcome
from nsa_harness.core.plan import Bound, Expect, Fault, Skip
from nsa_harness.core.report import (
    Artifact,
    Finding,
    HangKind,
    MachineFacts,
    Outcome,
    RankStatus,
    RankSummary,
    Report,
    SpecSummary,
    Status,
    Timing,
    Trouble,
    Usage,
    Verdict,
    counts,
    exit_code,
)
from nsa_harness.core.verdict.verdict import judge

CRITERIA = (("expect.verdict", "PASS"), ("limits.deadline_s", "600.0"))
HUNG = (in_all_reduce(0, collective(6)), locked_in_backward(1))


def outcome(seen: Evidence, metrics: dict[str, float] | None = None, **changes: Any) -> Outcome:
    return judge_evidence(
        spec(**changes),
        seen,
        attempt=1,
        directory="ddp_onestep",
        artifacts=(),
        metrics=metrics or {},
        repeat="nsa-harness run spec.json",
    )


def left(rank: int, status: int | None = 0, **changes: Any) -> RankEvidence:
    return rank_evidence(rank, exit=ended(rank, status), **changes)


# The outcome.

DONE = board(
    mark("exit", at_s=30.0),
    mark("step", step=2),
    enqueued=4,
    completed=4,
    steps_s=((1, 5.0), (2, 6.0)),
    gaps_s={"data": 0.5},
)
TRACED = RankTraces(
    gradient_count=3,
    missing_count=0,
    missing_parameters=(),
    buckets=((600_000, "torch.float32"), (300_000, "torch.float32")),
)


def test_a_run_that_passed_is_told_whole() -> None:
    ranks = tuple(
        left(rank, status_file=DONE, traces=TRACED, last_loss=2.5, peak_rss_bytes=rank + 1, peak_gpu_bytes=7)
        for rank in (0, 1)
    )
    trouble = (Trouble(what="board", why="torn"),)
    artifacts = (Artifact(path="output.log", count=3, absent=None),)
    told = judge_evidence(
        spec(notes=("CPU form",), not_covered=("nccl",)),
        evidence(*ranks, trouble=trouble),
        attempt=2,
        directory="ddp_onestep~2",
        artifacts=artifacts,
        metrics={"tokens_per_s": 9.0},
        repeat="nsa-harness run spec.json",
    )
    vitals = tuple(
        RankSummary(
            rank=rank,
            loss=2.5,
            gradients="3 of 3",
            buckets="2 · 0.9 M fp32",
            longest_gap_s=0.5,
            peak_rss_bytes=rank + 1,
            step_s=1.0,
        )
        for rank in (0, 1)
    )
    assert told == Outcome(
        spec=SpecSummary(
            scenario="ddp_onestep",
            about="One DDP step",
            spec_hash="9c1e",
            subject="train.py",
            ranks=2,
            backend="gloo",
            notes=("CPU form",),
            not_covered=("nccl",),
            device="cpu",
            criteria=CRITERIA,
        ),
        attempt=2,
        final=True,
        verdict=Verdict(status=Status.PASS, kind=None, cause=None, summary="every rank ended with exit code 0"),
        expected=True,
        flaky=False,
        phase="step",
        culprit=None,
        victims=(),
        last_step={0: 2, 1: 2},
        exit_codes={0: 0, 1: 0},
        findings=(),
        trouble=trouble,
        timing=Timing(launch_s=2.0, wall_s=31.5, no_progress_s=None, detected_s=None, teardown_s=0.5),
        usage=Usage(peak_rss_bytes=2, peak_gpu_bytes=7, tokens_per_s=9.0),
        dir="ddp_onestep~2",
        passed_checks=(
            "losses finite on every rank",
            "3 of 3 gradients on every rank",
            "4 of 4 collectives completed, the same on every rank",
            "every rank exited 0",
            "no process left",
        ),
        ruled_out_causes=(),
        rank_statuses=(),
        rank_summaries=vitals,
        metrics={"tokens_per_s": 9.0},
        artifacts=artifacts,
        proof_reason=None,
        ending_text="by itself, no process left",
        repeat_command="nsa-harness run spec.json",
        next_command=None,
        missing_gradients=(),
    )


def test_settings_and_criteria_say_what_makes_two_runs_comparable() -> None:
    planted = Fault(kind="deadlock", rank=1, step=2)
    wanted = Expect(verdict="FAIL", missing_grads=0, metrics=(("loss_last", Bound(lt=5.7, gt=0.0)),))
    told = outcome(evidence(left(0)), tags=("plan",), settings=(("gc.layers", "all"),), fault=planted, expect=wanted)
    assert told.spec.tags == ("plan",)
    assert told.spec.settings == (
        ("fault.kind", "deadlock"),
        ("fault.rank", "1"),
        ("fault.step", "2"),
        ("gc.layers", "all"),
    )
    assert dict(told.spec.criteria) == {
        "expect.verdict": "FAIL",
        "expect.missing_grads": "0",
        "expect.metrics.loss_last": "< 5.7 > 0",
        "limits.deadline_s": "600.0",
    }


@pytest.mark.parametrize(
    ("traces", "names"),
    [
        ((TRACED, TRACED), ()),
        ((TRACED, replace(TRACED, missing_count=1, missing_parameters=("b", "a"))), ("a", "b")),
        ((TRACED, UNTRACED), None),
        ((), None),
    ],
)
def test_parameters_without_gradient_are_known_only_where_every_rank_traced(
    traces: tuple[RankTraces, ...], names: tuple[str, ...] | None
) -> None:
    told = outcome(evidence(*(left(rank, traces=one) for rank, one in enumerate(traces))))
    assert told.missing_gradients == names


def test_a_hang_says_the_last_collective_that_every_rank_has_left() -> None:
    boards = [board(mark(at_s=9.0), calls=(call(1, left_s=4.0), call(2, left_s=end))) for end in (5.0, None)]
    ranks = tuple(
        rank_evidence(rank, status_file=one, exit=ended(rank, -15, by_us=True)) for rank, one in enumerate(boards)
    )
    assert outcome(stalled(*LOCKED, ranks=ranks)).last_agreed == "all_reduce (ada/train.py:37, step 1)"
    blind = (ranks[0], replace(ranks[1], status_file=None))
    assert outcome(stalled(*HUNG, ranks=blind)).last_agreed is None
    assert outcome(evidence(left(0, status_file=boards[0]), left(1, status_file=boards[0]))).last_agreed is None


LOCKED = (locked_in_backward(0), locked_in_backward(1))
_DDP = (collective(1, retired=True, created_ns=5 * 10**9), collective(2, retired=True, created_ns=6 * 10**9))


@pytest.mark.parametrize(
    ("recorders", "last_shared"),
    [
        (((), ()), None),
        ((_DDP, ()), None),
        ((_DDP, _DDP), "all_reduce #2 (by DDP or FSDP, step 1)"),
        ((_DDP, (_DDP[0], replace(_DDP[1], retired=False))), "all_reduce #1 (by DDP or FSDP, step 1)"),
        ((_DDP, (_DDP[0], replace(_DDP[1], op="barrier"))), "all_reduce #1 (by DDP or FSDP, step 1)"),
        ([tuple(replace(one, group="3") for one in _DDP)] * 2, "all_reduce #2 of group 3 (by DDP or FSDP, step 1)"),
    ],
    ids=["no recorder", "one recorder", "both", "one waits", "another call", "a group"],
)
def test_a_call_before_the_gradients_were_reduced_is_not_the_last_shared_one(
    recorders: Sequence[tuple[Collective, ...]], last_shared: str | None
) -> None:
    """DDP reduces gradients in C++, so only the flight recorder shows these calls."""
    setup = board(mark("backward", at_s=9.0), calls=(call(1, "init_process_group"),), steps_s=((1, 8.0),), zero_ns=0)
    ranks = tuple(
        rank_evidence(rank, status_file=setup, collectives=one, exit=ended(rank, -15, by_us=True))
        for rank, one in enumerate(recorders)
    )
    assert outcome(stalled(*LOCKED, ranks=ranks)).last_agreed == last_shared


def test_a_failure_says_which_rank_raised_first_and_what() -> None:
    boom = raised(1, "ValueError", "a bad batch\nof file 3")
    failed = evidence(left(0), rank_evidence(1, exception=boom, exit=ended(1, 1)))
    assert outcome(failed).raised == "rank 1: ValueError: a bad batch of file 3"
    assert outcome(
        evidence(left(0), rank_evidence(1, exception=replace(boom, message=""), exit=ended(1, 1)))
    ).raised == ("rank 1: ValueError")
    assert outcome(evidence(left(0), left(1))).raised == ""


def test_a_skip_keeps_what_the_scenario_set() -> None:
    skip = skipped_outcome(
        Skip(scenario="x", about="", reason="", tags=("plan",), settings=(("needs.backend", "nccl"),))
    )
    assert (skip.spec.tags, skip.spec.settings) == (("plan",), (("needs.backend", "nccl"),))


def test_a_hang_is_told_with_its_proof_its_culprit_and_its_victims() -> None:
    boards = board(mark(at_s=8.0)), board(mark("backward", "blocks.2", step=3, at_s=9.0), steps_s=((1, 1.0), (2, 2.0)))
    ranks = tuple(
        rank_evidence(rank, status_file=one, exit=ended(rank, -15, by_us=True)) for rank, one in enumerate(boards)
    )
    told = outcome(stalled(*HUNG, ranks=ranks))
    assert told.verdict == Verdict(
        status=Status.HANG,
        kind=HangKind.DEADLOCK,
        cause="backward_function_blocked",
        summary=told.findings[0].claim,
    )
    assert told.culprit is not None
    assert (told.culprit.ranks, told.victims, told.phase) == ((1,), (0,), "backward")
    assert told.last_step == {0: 0, 1: 2}
    assert told.exit_codes == {0: None, 1: None}, "as before our own kill"
    assert told.timing == Timing(launch_s=2.0, wall_s=20.5, no_progress_s=10.0, detected_s=11.0, teardown_s=0.5)
    assert (
        told.proof_reason
        == "2 ranks wait, and nobody is left to end that; no progress, CPU time or I/O in two samples 2 s apart"
    )
    assert told.rank_statuses == (
        RankStatus(rank=0, blocked_in="all_reduce #6", waits_for="rank 1", no_progress_s=12.0, is_culprit=False),
        RankStatus(
            rank=1, blocked_in="a lock in hook", waits_for="its own process", no_progress_s=11.0, is_culprit=True
        ),
    )
    assert told.ruled_out_causes == (
        "slow (no rank computes)",
        "network (the ranks are not all in the same collective)",
        "data and files (no rank is blocked in a read or write)",
        "errors (no rank raised, none died)",
    )
    assert told.passed_checks == ("no process left",)
    assert told.ending_text == "SIGTERM, 0.5 s, no process left"


def test_proof_paths_are_told_from_the_runs_directory() -> None:
    assert outcome(evidence(left(0, -9))).findings[0].proof == ("ddp_onestep/processes.jsonl",)


def test_a_stopped_rank_that_our_own_end_resumed_was_silent_since_the_last_look() -> None:
    stopped = replace(
        rank_snapshot(1, frame(7)), process=process(101, state="T"), status_file=board(mark(at_s=9.0), rank=1, pid=101)
    )
    seen = stalled(in_all_reduce(0, collective(6)), stopped, at_s=20.0)
    resumed = replace(seen.ranks[1], status_file=board(mark(at_s=20.4), rank=1, pid=101))
    told = outcome(replace(seen, ranks=(seen.ranks[0], resumed)))
    assert told.verdict.cause == "stopped_process"
    assert told.timing.detected_s == 11.0


def test_a_failure_is_detected_from_its_own_time_on() -> None:
    told = outcome(evidence(left(0, 1, exception=raised(0, at_s=9.0), status_file=DONE)))
    assert (told.timing.detected_s, told.timing.no_progress_s) == (22.0, None)
    assert told.exit_codes == {0: 1}


def test_without_boards_steps_phase_and_quiet_are_unknown() -> None:
    told = outcome(stalled(*HUNG))
    assert (told.last_step, told.phase) == ({0: None, 1: None}, None)
    assert (told.timing.detected_s, told.timing.no_progress_s) == (None, 10.0)
    assert [row.no_progress_s for row in told.rank_statuses] == [None, None]
    assert outcome(stalled(*HUNG, last_progress_s=None)).timing.no_progress_s is None


def test_a_missed_number_makes_a_passed_run_fail() -> None:
    told = outcome(evidence(left(0)), {"loss": 3.0}, expect=Expect(metrics=(("loss", Bound(lt=2.0)),)))
    assert told.verdict == Verdict(
        status=Status.FAIL,
        kind=None,
        cause="expectation_missed",
        summary="expect.metrics.loss: 3 is not < 2",
    )
    assert (told.expected, told.findings[0].code) == (False, "expectation_missed")


def test_of_several_missed_numbers_the_first_is_the_summary() -> None:
    told = outcome(evidence(left(0)), expect=Expect(metrics=(("a", Bound(lt=2.0)), ("b", Bound(lt=2.0)))))
    assert told.verdict.summary == "expect.metrics.a: the run reported no such number (reported: none) (and 1 more)"


def test_a_run_that_failed_is_not_asked_for_its_numbers() -> None:
    told = outcome(evidence(left(0, 3)), expect=Expect(metrics=(("a", Bound(lt=2.0)),)))
    assert (told.verdict.cause, [one.code for one in told.findings]) == ("bad_exit", ["bad_exit"])


def test_an_announced_hang_is_expected() -> None:
    assert outcome(stalled(*HUNG), expect=Expect(verdict="HANG")).expected is True
    assert outcome(stalled(*HUNG)).expected is False


def test_a_skip_is_never_a_surprise() -> None:
    told = skipped_outcome(Skip(scenario="ddp_nccl", about="nccl", reason="no GPU"))
    assert told.verdict == Verdict(status=Status.SKIP, kind=None, cause="missing_need", summary="no GPU")
    assert (told.expected, told.final, told.spec.scenario, told.ending_text) == (
        True,
        True,
        "ddp_nccl",
        "nothing was started",
    )


def test_a_fault_of_the_harness_is_an_error_of_that_attempt() -> None:
    told = unjudged_outcome(spec(), attempt=3, directory="ddp_onestep~3", error="OSError: disk full")
    assert told.verdict == Verdict(status=Status.ERROR, kind=None, cause="harness_error", summary="OSError: disk full")
    assert (told.expected, told.attempt, told.dir, told.spec.spec_hash) == (False, 3, "ddp_onestep~3", "9c1e")


def test_an_attempt_whose_directory_is_lost_has_this_cause_and_no_culprit() -> None:
    told = unjudged_outcome(spec(), attempt=1, directory="a", error="it was moved", cause=Cause.ATTEMPT_DIRECTORY_LOST)
    assert (told.verdict.status, told.verdict.cause, told.culprit) == (Status.ERROR, "attempt_directory_lost", None)


# The words.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ending": Ending.NOT_LAUNCHED}, "nothing was started"),
        ({}, "by itself, no process left"),
        ({"unkillable": ("7 python",)}, "by itself, 1 process left: 7 python"),
        ({"unkillable": None}, "by itself, nobody saw whether a process is left"),
        ({"leftovers": ("7 sleep",)}, "SIGTERM, 0.5 s, no process left"),
        ({"ending": Ending.DEADLINE}, "SIGTERM, 0.5 s, no process left"),
    ],
)
def test_how_the_processes_were_ended(changes: dict[str, Any], words: str) -> None:
    assert outcome(evidence(left(0), **changes)).ending_text == words


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"last_loss": math.nan}, "losses finite on every rank"),
        ({"last_loss": None}, "losses finite on every rank"),
        ({"traces": replace(TRACED, missing_count=1)}, "3 of 3 gradients on every rank"),
        ({"status_file": replace(DONE, completed=3)}, "4 of 4 collectives completed, the same on every rank"),
        (
            {"status_file": replace(DONE, enqueued=3, completed=3)},
            "4 of 4 collectives completed, the same on every rank",
        ),
        ({"status_file": None}, "4 of 4 collectives completed, the same on every rank"),
        ({"exit": None}, "every rank exited 0"),
    ],
)
def test_only_what_was_found_in_order_on_every_rank_is_said_to_be_checked(
    changes: dict[str, Any], missing: str
) -> None:
    good = [left(rank, status_file=DONE, traces=TRACED, last_loss=2.5) for rank in (0, 1)]
    assert missing in outcome(evidence(*good)).passed_checks
    assert missing not in outcome(evidence(good[0], replace(good[1], **changes))).passed_checks


def test_a_process_left_behind_or_never_started_is_not_told_as_clean() -> None:
    unclean: list[dict[str, Any]] = [{"leftovers": ("7 sleep",)}, {"unkillable": ("7 sleep",)}, {"unkillable": None}]
    for changes in (*unclean, {"ending": Ending.NOT_LAUNCHED}):
        assert "no process left" not in outcome(evidence(left(0), **changes)).passed_checks


def test_what_a_hang_shows_is_not_ruled_out() -> None:
    reading = rank_snapshot(0, frame(6), process=process(tasks=(task(syscall="read"),)))
    told = outcome(
        stalled(reading, at_s=400.0, ranks=(rank_evidence(0, exception=raised(0), exit=ended(0, -15, by_us=True)),))
    )
    assert told.verdict.kind is HangKind.STARVED
    assert told.ruled_out_causes == (
        "slow (no rank computes)",
        "network (the ranks are not all in the same collective)",
    )
    stuck = outcome(stalled(in_all_reduce(0, collective(6)), in_all_reduce(1, collective(6)), at_s=400.0))
    assert stuck.ruled_out_causes == (
        "slow (no rank computes)",
        "data and files (no rank is blocked in a read or write)",
        "errors (no rank raised, none died)",
    )


def test_data_is_not_ruled_out_beside_the_finding_that_training_waits_for_its_input() -> None:
    seen = stalled(in_all_reduce(0, collective(6)), in_all_reduce(1, collective(6)), at_s=400.0)
    without, with_finding = (set(ruled_out_causes(seen, judge(seen), codes)) for codes in ((), ("input_bound",)))
    assert without - with_finding == {"data and files (no rank is blocked in a read or write)"}


def test_whom_a_rank_waits_for_is_said_in_words() -> None:
    reading = rank_snapshot(0, frame(6), process=process(tasks=(task(syscall="read"),)))
    assert [row.waits_for for row in outcome(stalled(reading, at_s=400.0)).rank_statuses] == ["outside the job"]
    pair = [in_all_reduce(rank, collective(6)) for rank in (0, 1, 2)]
    assert outcome(stalled(*pair, at_s=400.0)).rank_statuses[0].waits_for == "ranks 1, 2"
    alone = stalled(in_all_reduce(0, collective(6)), exits=(ended(1, 3),), ranks=(rank_evidence(0), left(1, 3)))
    assert [row.waits_for for row in outcome(alone).rank_statuses] == ["rank 1", "nobody"]


def test_where_the_ranks_of_a_failed_run_stood_last() -> None:
    ranks = (
        left(0, -9, status_file=board(mark("forward", "blocks.1", at_s=8.0))),
        rank_evidence(1, status_file=board(mark("optimizer", at_s=8.0))),
        rank_evidence(2, exit=ended(2, -15, by_us=True)),
    )
    assert outcome(evidence(*ranks)).rank_statuses == (
        RankStatus(
            rank=0,
            blocked_in="was terminated by SIGKILL · last in forward blocks.1",
            waits_for="",
            no_progress_s=None,
            is_culprit=True,
        ),
        RankStatus(rank=1, blocked_in="optimizer", waits_for="", no_progress_s=23.0, is_culprit=False),
        RankStatus(rank=2, blocked_in="nothing recorded", waits_for="", no_progress_s=None, is_culprit=False),
    )


def test_a_rank_that_told_nothing_has_no_vital_numbers() -> None:
    nothing = RankSummary(rank=0, loss=None, gradients=None, buckets=None, longest_gap_s=None, peak_rss_bytes=None)
    assert summarize_rank(rank_evidence(0)) == nothing
    assert summarize_rank(rank_evidence(0, status_file=board())).longest_gap_s is None


def test_buckets_of_an_unknown_type_keep_its_name() -> None:
    traces = replace(TRACED, buckets=((2_000_000, "torch.float8_e4m3fn"),))
    assert summarize_rank(rank_evidence(0, traces=traces)).buckets == "1 · 2.0 M torch.float8_e4m3fn"


# The exit code.


def report(outcomes: Sequence[Outcome], *, interrupted: bool = False) -> Report:
    machine = MachineFacts(host="node7", cpus=2, gpus=(), torch=None)
    return Report(
        run_id="r", harness="0.1.0", machine=machine, command="run x", interrupted=interrupted, outcomes=tuple(outcomes)
    )


def ending(status: Status, *, expected: bool = False, final: bool = True) -> Outcome:
    plain = skipped_outcome(Skip(scenario="x", about="", reason=""))
    verdict = Verdict(status=status, kind=None, cause=None, summary="")
    return replace(plain, verdict=verdict, expected=expected, final=final)


PASS, SKIP = ending(Status.PASS, expected=True), ending(Status.SKIP, expected=True)
CODES = ("replica_divergence", "find_unused_needless")
HANG, FAIL, ERROR = ending(Status.HANG), ending(Status.FAIL), ending(Status.ERROR)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([PASS], 0),
        ([PASS, SKIP], 0),
        ([SKIP, SKIP], 125),
        ([], 125),
        ([FAIL, HANG, ERROR], 124),
        ([FAIL, ERROR, PASS], 1),
        ([ending(Status.PASS)], 1),
        ([ERROR, PASS], 125),
        ([ending(Status.ERROR, expected=True)], 125),
        ([ending(Status.HANG, expected=True), PASS], 0),
        ([ending(Status.FAIL, expected=True)], 0),
        ([ending(Status.HANG, final=False), PASS], 0),
    ],
)
def test_the_exit_code_says_the_worst_that_surprised(outcomes: list[Outcome], code: int) -> None:
    assert exit_code(report(outcomes)) == code


@pytest.mark.parametrize(("optimizer", "steps_s"), [(True, ()), (False, ((1, 1.0), (2, 2.0))), (False, ())])
def test_of_a_program_without_an_optimizer_no_step_is_told(optimizer: bool, steps_s: tuple[Any, ...]) -> None:
    made = board(mark("collective"), steps_s=steps_s, has_optimizer=optimizer)
    told = outcome(evidence(rank_evidence(0, exit=ended(0, -9, at_s=9.0), status_file=made)))
    counts = optimizer or bool(steps_s)
    assert told.culprit is not None
    assert (told.culprit.step is not None, ", step " in told.findings[0].claim) == (counts, counts)
    assert told.last_step == {0: len(steps_s) if counts else None}


def test_strict_does_not_let_a_silent_fault_pass() -> None:
    noted = [Finding(code=code, claim="", ranks=(), place=None, confidence=0.85, proof=(), advice="") for code in CODES]
    wrong, informed = (replace(PASS, findings=(one,)) for one in noted)
    assert strict_exit_code(report([PASS, informed])) == 0, "what informs is no fault"
    assert (exit_code(report([wrong])), strict_exit_code(report([PASS, wrong]))) == (0, 1)
    assert strict_exit_code(report([wrong, SKIP])) == 125
    assert strict_exit_code(report([PASS, replace(wrong, final=False)])) == 0


def test_strict_does_not_let_a_skip_pass() -> None:
    assert exit_code(report([PASS, SKIP]), strict=True) == 125
    assert exit_code(report([PASS]), strict=True) == 0
    assert exit_code(report([FAIL, SKIP]), strict=True) == 1


def test_an_interrupted_run_says_130_whatever_it_saw() -> None:
    assert exit_code(report([HANG, FAIL], interrupted=True)) == 130


_OUTCOMES = st.lists(
    st.builds(ending, st.sampled_from(list(Status)), expected=st.booleans(), final=st.booleans()), max_size=4
)


@given(_OUTCOMES, st.randoms(), st.booleans())
def test_the_exit_code_does_not_depend_on_the_order_and_surprises_outrank_it(
    outcomes: list[Outcome], random: Any, strict: bool
) -> None:
    shuffled = list(outcomes)
    random.shuffle(shuffled)
    code = exit_code(report(outcomes), strict=strict)
    assert code == exit_code(report(shuffled), strict=strict)
    rank = {0: 0, 125: 1, 1: 2, 124: 3}
    assert rank[exit_code(report([*outcomes, FAIL]), strict=strict)] >= max(rank[code], 2)
    assert exit_code(report([*outcomes, HANG]), strict=strict) == 124


def test_the_counts_are_of_the_outcomes_that_count() -> None:
    seen = counts([PASS, PASS, ending(Status.HANG, final=False), FAIL])
    assert seen == {Status.PASS: 2, Status.FAIL: 1, Status.HANG: 0, Status.SKIP: 0, Status.ERROR: 0}
