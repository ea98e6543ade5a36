"""What a bisection keeps: each probe once, found again by its question, whatever the kill left behind."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

from nsa_harness.core.bisect.question import CountsAs, Purpose, spans_of
from nsa_harness.core.bisect.report import ProbeReport
from nsa_harness.core.report import HangKind, Place
from nsa_harness.supervisor.bisect.journal import Journal, question_key, unfinished, write_state
from nsa_harness.supervisor.store.rundir import RunDir, create_run


def _kept(n: int, subset: tuple[int, ...], *, in_full: bool = False) -> ProbeReport:
    return ProbeReport(
        n=n, subset=spans_of(subset), purpose=Purpose.RIGHT_EDGE, open=(0, 12), left=3, in_full=in_full,
        launcher="fork", verdict="HANG", kind=HangKind.DEADLOCK, cause="lock_cycle", summary="rank 1 waits",
        place=Place(file="m.py", line=4), culprits=(1,), phase="backward", counts_as=CountsAs.BAD, wall_s=4.2,
        longest_quiet_s=0.1, dir=f"p{n:02d}", spec_hash="abc",
    )  # fmt: skip


def _journal(run: RunDir, *kept: ProbeReport) -> Journal:
    journal = Journal(run)
    for one in kept:
        journal.keep(one)
    return Journal(run)


def test_what_was_kept_answers_once_each_in_the_order_it_was_made(tmp_path: Path) -> None:
    first, second = _kept(3, (1, 2)), _kept(5, (1, 2))
    journal = _journal(create_run(tmp_path), first, _kept(4, (7,)), second)
    asked = frozenset({1, 2})
    assert journal.take(asked, in_full=False) == first
    assert journal.take(asked, in_full=False) == second
    assert journal.take(asked, in_full=False) is None


def test_a_proof_is_never_answered_by_a_probe_that_torchrun_did_not_launch(tmp_path: Path) -> None:
    proof = _kept(9, (7,), in_full=True)
    journal = _journal(create_run(tmp_path), _kept(3, (7,)), proof)
    assert journal.take(frozenset({7}), in_full=True) == proof
    assert journal.take(frozenset({7}), in_full=True) is None


def test_a_torn_or_foreign_line_is_a_probe_that_has_not_ended(tmp_path: Path) -> None:
    run = create_run(tmp_path)
    _journal(run, _kept(1, ()))
    with run.search_probes.open("a") as probes:
        probes.write('{"n": "two"}\n[]\n{"n": 3, "subset": [1')
    assert [one.n for one in Journal(run).kept] == [1]


def test_the_newest_unfinished_bisection_of_the_same_question_is_gone_on_with(tmp_path: Path) -> None:
    mine, other, ended = create_run(tmp_path), create_run(tmp_path), create_run(tmp_path)
    write_state(mine, "k1", "q", "c", ended=False)
    write_state(other, "k2", "q", "c", ended=False)
    write_state(ended, "k1", "q", "c", ended=True)
    found = unfinished(tmp_path, "k1")
    assert found is not None
    assert found.path == mine.path
    assert unfinished(tmp_path, "k3") is None


def test_a_bisection_that_somebody_runs_is_left_to_him(tmp_path: Path) -> None:
    run = create_run(tmp_path)
    write_state(run, "k1", "q", "c", ended=False)
    with FileLock(run.lock):
        assert unfinished(tmp_path, "k1") is None
    run.search_state.write_text("{")
    assert unfinished(tmp_path, "k1") is None


def test_another_question_has_another_key() -> None:
    assert question_key("a", 1) == question_key("a", 1)
    assert question_key("a", 1) != question_key("a", 2)
