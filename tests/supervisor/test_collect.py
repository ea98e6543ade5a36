"""From files to evidence to a verdict: of real runs, whole and damaged."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from attempts import (
    CLEAN,
    CLEAN_END,
    ORIGIN,
    RANKS,
    STORED,
    STORED_CASES,
    at,
    clean,
    journal,
    left,
    said,
    spec,
    started,
    unpack,
)

from nsa_harness import protocol
from nsa_harness.commands import judge as run_judge
from nsa_harness.commands.judge import judge_attempt
from nsa_harness.core.evidence.evidence import Ending, Exit, Frame, RaisedException, RankEvidence
from nsa_harness.core.evidence.gradients import RankTraces
from nsa_harness.core.plan import Bound, Expect, Limits
from nsa_harness.core.report import Outcome, Status, Trouble
from nsa_harness.subject.tables import reported_values
from nsa_harness.supervisor.storage.collect import collect, find_hiding_file
from nsa_harness.supervisor.storage.metrics import printed_metrics
from nsa_harness.supervisor.storage.record import load_spec
from nsa_harness.supervisor.storage.rundir import AttemptDir

UNTRACED = RankTraces(gradient_count=None, missing_count=None, missing_parameters=(), buckets=())


def judged(attempt: AttemptDir) -> Outcome:
    return judge_attempt(attempt, load_spec(attempt.spec), "node7", 1)


# Real runs, recorded.


@pytest.mark.parametrize("case", STORED_CASES)
def test_a_recorded_run_is_judged_again_to_the_same_verdict(case: str, tmp_path: Path) -> None:
    outcome = judged(unpack(case, tmp_path / case))
    culprit = outcome.culprit
    place = culprit.place if culprit else None
    assert {
        "status": outcome.verdict.status,
        "kind": outcome.verdict.kind,
        "cause": outcome.verdict.cause,
        "ranks": list(culprit.ranks) if culprit else None,
        "step": culprit.step if culprit else None,
        "line": place.line if place else None,
        "module": place.module if place else None,
        "trouble": [one.what for one in outcome.trouble],
        "silent": [[one.code, list(one.ranks)] for one in outcome.findings if outcome.verdict.status is Status.PASS],
    } == json.loads((STORED / case / "expected.json").read_text())


def test_every_kind_of_verdict_is_among_the_recorded_runs() -> None:
    known = [json.loads((STORED / case / "expected.json").read_text()) for case in STORED_CASES]
    assert {one["status"] for one in known} == {"PASS", "FAIL", "HANG"}
    assert {one["kind"] for one in known} >= {None, "deadlock", "livelock", "stopped"}


def test_judging_twice_gives_the_same_verdict_file(tmp_path: Path) -> None:
    attempt = unpack("collective_skipped", tmp_path / "run")
    judged(attempt)
    first = attempt.verdict.read_bytes()
    judged(attempt)
    assert attempt.verdict.read_bytes() == first
    assert attempt.result.read_text() == "HANG\n"


def test_a_verdict_is_not_lost_where_no_way_to_repeat_it_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(run_judge, "reproduction", fails)
    outcome = judged(unpack("collective_skipped", tmp_path / "run"))
    assert outcome.verdict.status is Status.HANG
    assert [one.absent for one in outcome.artifacts if one.path == "repro"] == [
        "it could not be created: ValueError: planted"
    ]


@pytest.mark.parametrize("case", STORED_CASES)
def test_without_any_journal_nothing_passes(case: str, tmp_path: Path) -> None:
    attempt = unpack(case, tmp_path / case)
    attempt.watch.unlink()
    attempt.processes.unlink()
    assert judged(attempt).verdict.status in (Status.ERROR, Status.FAIL)


# Pieces.


def test_a_run_without_a_probe_comes_to_evidence_of_its_exits_alone(tmp_path: Path) -> None:
    seen = collect(clean(tmp_path), spec(), "node7")
    launcher = Exit(pid=10, rank=None, status=0, at_s=6.0, during_teardown=False)
    exits = [Exit(pid=100 + rank, rank=rank, status=0, at_s=5.0 + rank / 10, during_teardown=False) for rank in (0, 1)]
    assert (seen.ending, seen.launcher, seen.exits) == (Ending.EXITED, launcher, (*exits, launcher))
    assert (seen.ended_s, seen.last_progress_s, seen.teardown_s, seen.launch_s) == (6.1, 4.9, 0.0, None)
    assert seen.limits == Limits(stall_s=20.0, busy_s=60.0, open_wait_s=300.0, start_s=120.0, deadline_s=600.0)
    assert seen.ranks == tuple(
        RankEvidence(
            rank=rank,
            pid=100 + rank,
            exit=exits[rank],
            exception=None,
            status_file=None,
            collectives=(),
            death_stacks=(),
            peak_rss_bytes=7 + rank,
            peak_gpu_bytes=None,
            traces=UNTRACED,
            last_loss=None,
            error_lines=(),
        )
        for rank in (0, 1)
    )
    why = "it was not written: the probe is off, or the program is not Python with torch"
    assert seen.trouble == tuple(Trouble(what="status file", why=why, rank=rank) for rank in (0, 1))


def test_the_evidence_is_also_written_down(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    collect(attempt, spec(), "node7")
    written = json.loads((attempt.evidence / "node7.json").read_text())
    assert (written["node"], written["world_size"], written["ending"]) == ("node7", 2, "exited")


def rank_log(attempt: AttemptDir, rank: int, stream: str, text: str, number: int = 0) -> None:
    path = attempt.logs / "x" / f"attempt_{number}" / str(rank) / f"{stream}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 8, in step\n    x\nRuntimeError: boom\n'
PRINTED = RaisedException(
    rank=0,
    at_s=None,
    type="RuntimeError",
    message="boom",
    frames=(Frame(file="train.py", line=8, function="step"),),
    proof="rank0/stderr.log",
)


def test_the_newest_log_of_a_rank_is_brought_to_its_folder_and_read(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    rank_log(attempt, 0, "stderr", "old")
    rank_log(attempt, 0, "stderr", TRACEBACK, number=1)
    seen = collect(attempt, spec(), "n").ranks[0]
    assert (attempt.rank(0) / "stderr.log").read_text() == TRACEBACK
    assert seen.exception == PRINTED
    assert seen.error_lines[-1] == "RuntimeError: boom"


def test_a_plain_launch_has_one_log_which_is_rank_zeros(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    attempt.output.write_text(TRACEBACK)
    seen = collect(attempt, spec(), "n").ranks
    assert (seen[0].exception, seen[1].exception) == (PRINTED, None)


def test_the_probes_own_record_of_an_exception_goes_before_the_printed_one(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    rank_log(attempt, 0, "stderr", TRACEBACK)
    attempt.probe_files.mkdir()
    frames = [{"file": "b.py", "line": 2, "function": "g"}]
    record = {"at_ns": at(4.0), "type": "KeyError", "message": "'x'", "frames": frames}
    (attempt.probe_files / "100.raised.json").write_text(json.dumps(record))
    assert collect(attempt, spec(), "n").ranks[0].exception == RaisedException(
        rank=0,
        at_s=4.0,
        type="KeyError",
        message="'x'",
        frames=(Frame(file="b.py", line=2, function="g"),),
        proof="rank0/raised.json",
    )


def test_a_file_in_the_python_path_that_hides_a_package_from_the_launcher_is_found(tmp_path: Path) -> None:
    lines = ["python: Error (ModuleNotFoundError: No module named 'torch.x'; 'torch' is not a package)"]
    assert find_hiding_file(lines, f"/nowhere:{tmp_path}") == ""
    (tmp_path / "torch.py").touch()
    assert find_hiding_file(lines, f"/nowhere:{tmp_path}") == str(tmp_path / "torch.py")
    assert find_hiding_file(["No module named 'torch.x'"], str(tmp_path)) == ""


def test_a_traceback_in_the_log_of_all_ranks_is_the_rank_s_that_recorded_the_exception(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    attempt.output.write_text(TRACEBACK)
    attempt.probe_files.mkdir()
    record = {"at_ns": at(4.0), "type": "RuntimeError", "message": "boom", "frames": []}
    (attempt.probe_files / "101.raised.json").write_text(json.dumps(record))
    first, second = collect(attempt, spec(), "n").ranks
    assert first.exception is None
    assert second.exception is not None
    assert (second.exception.type, second.exception.at_s) == ("RuntimeError", 4.0)


@pytest.mark.parametrize("text", ["{}", '{"at_ns": "x"}', "[1]", "nonsense", '{"at_ns": 1e999, "frames": []}'])
def test_a_record_of_an_exception_that_is_garbled_falls_back_to_the_printed_one(tmp_path: Path, text: str) -> None:
    attempt = clean(tmp_path)
    rank_log(attempt, 0, "stderr", TRACEBACK)
    attempt.probe_files.mkdir()
    (attempt.probe_files / "100.raised.json").write_text(text)
    assert collect(attempt, spec(), "n").ranks[0].exception == PRINTED


def test_the_traces_of_all_ranks_are_gathered_with_their_ranks(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    for rank in (0, 1):
        rank_log(attempt, rank, "stdout", f"x\n[GRAD-TRACE] after_backward_step1 arrived=3 missing={rank}\n")
    seen = collect(attempt, spec(), "n").ranks
    assert [one.traces.missing_count for one in seen] == [0, 1]
    assert attempt.traces.read_text() == (
        "[rank0] [GRAD-TRACE] after_backward_step1 arrived=3 missing=0\n"
        "[rank1] [GRAD-TRACE] after_backward_step1 arrived=3 missing=1\n"
    )


def test_a_stack_at_death_is_read_and_an_empty_file_is_none(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    attempt.probe_files.mkdir()
    (attempt.probe_files / "100.stacks.txt").write_text(
        'Current thread 0x01 (most recent call first):\n  File "a.py", line 3 in f\n'
    )
    (attempt.probe_files / "101.stacks.txt").write_text("")
    ranks = collect(attempt, spec(), "n").ranks
    assert [one.frames for one in ranks[0].death_stacks] == [(Frame(file="a.py", line=3, function="f"),)]
    assert ranks[1].death_stacks == ()
    assert not (attempt.rank(1) / "stacks.txt").exists()


def test_what_nccl_left_before_it_aborted_a_rank_stands_in_for_the_probes_own_dump(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    attempt.probe_files.mkdir()
    entry = {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 42,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": ((4,),),
        "input_dtypes": ["Float"],
        "state": "started",
        "retired": False,
        "time_created_ns": 1,
        "is_p2p": False,
    }
    (attempt.probe_files / protocol.NCCL_DUMP.format(rank=1)).write_bytes(
        pickle.dumps({"entries": [entry]}, protocol=2)
    )
    ranks = collect(attempt, spec(backend="nccl"), "n").ranks
    assert ranks[0].collectives == ()
    assert [(one.op, one.seq, one.started, one.retired) for one in ranks[1].collectives] == [
        ("all_reduce", 42, True, False)
    ]


def test_the_numbers_of_training_are_read_from_its_table(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    (attempt.path / "training.csv").write_text(
        "step,loss,tokens_per_s,grad_norm,forward_s,seconds\n1,3.5,,x,0.5,9\n2,2.5,100,,1.5,2\n"
    )
    assert collect(attempt, spec(), "n").metrics == {}
    assert collect(attempt, spec(), "n", reported_values).metrics == {
        "steps": 2.0,
        "loss_first": 3.5,
        "loss_last": 2.5,
        "tokens_per_s": 100.0,
        "forward_s": 1.0,
        "step_s_median": 2.0,
        "tokens_per_s_median": 100.0,
        "tokens_per_s_slowest": 100.0,
    }


def test_a_table_of_training_without_a_row_tells_of_no_step_and_no_table_tells_nothing(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    assert collect(attempt, spec(), "n", reported_values).metrics == {}
    (attempt.path / "training.csv").write_text("step,loss\n")
    assert collect(attempt, spec(), "n", reported_values).metrics == {"steps": 0.0}


def test_the_gates_of_the_newest_step_are_read_and_a_torn_line_does_not_count(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    rows = ["step,layer,branch,mean,std,saturated_share"]
    rows += [f"{step},{layer},sel,0.00{step},0.1,1.0" for step in (1, 2) for layer in (0, 1)]
    (attempt.path / "gate_health.csv").write_text("\n".join([*rows, "2,2,sel,inf,0.1,1.0", "3,0,sel,0.0"]))
    seen = collect(attempt, spec(), "n", reported_values)
    gate = {"step": 2.0, "branch": "sel", "mean": 0.002, "std": 0.1, "saturated_share": 1.0}
    assert seen.program_records == ({**gate, "layer": 0.0}, {**gate, "layer": 1.0})
    assert json.loads((attempt.evidence / "n.json").read_text())["reported"] == list(seen.program_records)
    assert collect(attempt, spec(), "n").program_records == ()


def test_a_table_that_cannot_be_read_is_trouble(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    (attempt.path / "training.csv").write_text('loss\n"' + "x" * 200_000)
    seen = collect(attempt, spec(), "n", reported_values)
    assert seen.metrics == {}
    assert "training.csv" in [one.what for one in seen.trouble]


def test_the_last_loss_and_the_peak_of_the_device_come_from_the_heartbeat(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    beats = [{"loss": 3.0, "gpu_peak_bytes": 5.0}, {"loss": 2.0}, {"loss": "x"}]
    journal(attempt.path / "heartbeat_rank0.jsonl", *beats)
    seen = collect(attempt, spec(), "n").ranks
    assert [(one.last_loss, one.peak_gpu_bytes) for one in seen] == [(2.0, 5), (None, None)]


def test_memory_is_what_a_rank_said_at_boot_in_its_newest_dump_and_last(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    beats = [
        {"step": 7, "phase": "step", "rss_bytes": 1},  # of a run before this one, which went on from it
        {"step": 0, "phase": "start", "rss_bytes": 10, "allocated_bytes": 3, "reserved_bytes": 4},
        {"step": 8, "phase": "step", "rss_bytes": 20, "allocated_bytes": 5, "reserved_bytes": 6},
        {"step": 9, "phase": "step", "rss_bytes": "x"},
    ]
    journal(attempt.path / "heartbeat_rank0.jsonl", *beats)
    for step, size in ((2, 11), (10, 12)):
        journal(attempt.path / f"mem_rank0_step{step}.json", {"step": step, "rss_bytes": size})
    (attempt.path / "mem_fsdp_rank1_step3.json").write_text("[")
    first, second = collect(attempt, spec(), "n").ranks
    told = [(one.moment, one.step, one.rss_bytes, one.allocated_bytes, one.reserved_bytes) for one in first.memory]
    assert told == [("boot", 0, 10, 3, 4), ("dump", 10, 12, None, None), ("last", 8, 20, 5, 6)]
    assert second.memory == ()


def test_the_heartbeat_of_an_earlier_version_tells_memory_without_an_allocator(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    journal(attempt.path / "heartbeat_rank0.jsonl", {"step": 0, "phase": "start", "rss_bytes": 10, "gpu_bytes": None})
    (boot,) = collect(attempt, spec(), "n").ranks[0].memory
    assert (boot.moment, boot.rss_bytes, boot.allocated_bytes) == ("boot", 10, None)


def test_what_nccl_wrote_is_read_from_either_stream_of_each_rank(tmp_path: Path) -> None:
    """Lines written by hand in the format of NCCL_DEBUG=INFO."""
    attempt = clean(tmp_path)
    for rank, stream in ((0, "stdout"), (1, "stderr")):
        attempt.rank(rank).mkdir(exist_ok=True)
        text = f"h:1:2 [{rank}] NCCL INFO NCCL version 2.27.5+cuda12.9\nh:1:2 [{rank}] NCCL INFO x - Init COMPLETE\n"
        (attempt.rank(rank) / f"{stream}.log").write_text(text)
    seen = collect(attempt, spec(), "n")
    assert seen.nccl is not None
    assert (seen.nccl.version, seen.nccl.connected_ranks) == ("2.27.5+cuda12.9", (0, 1))
    assert json.loads((attempt.evidence / "n.json").read_text())["nccl"]["connected"] == [0, 1]


@pytest.mark.parametrize("peak", [float("inf"), float("nan"), True])
def test_a_peak_that_is_no_number_of_bytes_is_unknown(tmp_path: Path, peak: object) -> None:
    attempt = clean(tmp_path)
    journal(attempt.path / "heartbeat_rank0.jsonl", {"gpu_peak_bytes": peak})
    assert collect(attempt, spec(), "n").ranks[0].peak_gpu_bytes is None


def test_trouble_is_gathered_from_the_journals_and_the_probes(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    journal(attempt.watch, ORIGIN, *RANKS, said("trouble", what="stacks", why="no ptrace", rank=1), CLEAN_END)
    attempt.probe_files.mkdir()
    (attempt.probe_files / "101.trouble.jsonl").write_text('{"piece": "hooks", "error": "old torch"}\n')
    trouble = collect(attempt, spec(), "n").trouble
    assert Trouble(what="stacks", why="no ptrace", rank=1) in trouble
    assert Trouble(what="probe: hooks", why="old torch", rank=1) in trouble


def test_what_a_launcher_could_not_start_is_in_the_evidence(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path)
    journal(attempt.processes, {"event": "failed", "t_ns": at(0.1), "error": "no such file"})
    journal(attempt.watch, ORIGIN, said("ending", 0.2, ending="not_launched", error="no such file"))
    seen = collect(attempt, spec(), "n")
    assert (seen.ending, seen.launcher, seen.launcher_error) == (Ending.NOT_LAUNCHED, None, "no such file")


def test_a_run_that_was_left_behind_is_told(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    journal(attempt.processes, *CLEAN, {"event": "ended", "t_ns": at(7.0), "outlived": ["7 sleep"], "left": ["8 dd"]})
    seen = collect(attempt, spec(), "n")
    assert (seen.leftovers, seen.unkillable) == (("7 sleep",), ("8 dd",))


def test_a_rank_that_came_and_went_unseen_is_known_from_the_agents_summary(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    journal(attempt.processes, started(), left(10, 1, 6.0))
    journal(attempt.watch, ORIGIN, CLEAN_END)
    attempt.output.write_text("  rank      : 1 (local_rank: 1)\n  exitcode  : 7 (pid: 101)\n")
    exit = collect(attempt, spec(), "n").ranks[1].exit
    assert exit is not None
    assert (exit.pid, exit.status, exit.during_teardown) == (101, 7, False)


# Foreign numbers.


def foreign(attempt: AttemptDir, **bounds: Any) -> dict[str, float]:
    expect = Expect(metrics=tuple((name, Bound(lt=9.0, regex=regex)) for name, regex in bounds.items()))
    return printed_metrics(attempt, expect)


def test_a_foreign_number_is_the_last_match_in_the_log(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path)
    attempt.output.write_text("loss 3.5\nloss 2.5\nacc none\n")
    assert foreign(attempt, loss=r"loss (\S+)", acc=r"acc (\S+)", other=r"never (\d)") == {"loss": 2.5}
    assert foreign(AttemptDir(tmp_path / "empty"), loss=r"loss (\S+)") == {}


@pytest.mark.parametrize("regex", ["(", r"(l)(o)ss", "loss"])
def test_an_expression_that_names_no_single_number_is_no_number(tmp_path: Path, regex: str) -> None:
    attempt = AttemptDir(tmp_path)
    attempt.output.write_text("loss 3.5\n")
    assert foreign(attempt, loss=regex) == {}
