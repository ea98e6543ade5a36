"""What is in an attempt's directory, how much of it, and why the rest is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from attempts import clean, journal, said, spec, unpack

from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Artifact
from nsa_harness.subject.files import program_files
from nsa_harness.supervisor.storage.collect import collect
from nsa_harness.supervisor.storage.inventory import inventory
from nsa_harness.supervisor.storage.record import load_spec
from nsa_harness.supervisor.storage.rundir import AttemptDir

SUBJECT = ("nsa", "--trace-grads")


def listed_of(attempt: AttemptDir, asked: RunSpec) -> tuple[Artifact, ...]:
    evidence = collect(attempt, asked, "n")
    return inventory(attempt, evidence, program_files(asked, evidence))


def listed(attempt: AttemptDir, program: tuple[str, ...] = ("train.py",)) -> dict[str, Artifact]:
    asked = spec(program=program)
    return {one.path: one for one in listed_of(attempt, asked)}


def absent(attempt: AttemptDir, program: tuple[str, ...] = ("train.py",)) -> dict[str, str | None]:
    return {path: one.absent for path, one in listed(attempt, program).items()}


def test_a_foreign_program_is_not_asked_for_the_files_of_ours(tmp_path: Path) -> None:
    assert absent(clean(tmp_path)) == {
        "output.log": "the program was not started",
        "heartbeat_rank*.jsonl": "no optimizer step was finished",
        "profile.txt": "no stall was suspected",
        "dumps/rank*.txt": "no stall was suspected",
        "step_ledger.txt": "no rank has both finished steps and a flight recorder",
        "rank*/flight.json": "torch.distributed was not used, or the rank died before its exit",
        "rank*/raised.json": "no rank raised an exception",
        "rank*/stacks.txt": "no rank died of a fatal signal",
        "env.json": "it could not be written",
    }


def test_our_own_program_that_did_no_step_did_not_reach_its_tables(tmp_path: Path) -> None:
    reasons = absent(clean(tmp_path), SUBJECT)
    assert reasons["k_stats.csv"] == "not reached: no optimizer step was done"
    assert reasons["traces.log"] == "no trace was switched on"
    assert reasons["mem_rank*.txt"] == "switched off: trace.mem_dump_every is 0"


def test_each_file_that_an_option_makes_is_switched_off_or_not_reached(tmp_path: Path) -> None:
    on = ("--mem-dump-every", "2", "--profile-memory", "--mem-snapshot", "--telemetry", "on", "--tensorboard")
    reasons, without = absent(clean(tmp_path), (*SUBJECT, *on)), absent(clean(tmp_path), ("nsa", "--no-trace-grads"))
    made = ("grad_order_rank*.jsonl", "mem_rank*.txt", "mem_rank*.json", "mem_profile_rank*.txt")
    made += ("mem_snapshot_rank*.pickle", "tensorboard/*")
    assert {reasons[path] for path in made} == {"not reached: no optimizer step was done"}
    assert [without[path] for path in made] == [
        "switched off: trace.grads is false",
        "switched off: trace.mem_dump_every is 0",
        "switched off: trace.mem_dump_every is 0",
        "switched off: trace.profile_memory is false",
        "switched off: trace.mem_snapshot is false",
        "switched off: trace.tensorboard is false",
    ]


def test_without_telemetry_its_files_are_switched_off(tmp_path: Path) -> None:
    reasons = absent(clean(tmp_path), (*SUBJECT, "--telemetry", "off"))
    off = "switched off: trace.telemetry is false"
    assert [path for path, why in reasons.items() if why == off] == [
        "training.csv", "k_stats.csv", "gate_health.csv", "fallback_counters.csv", "step_cost.csv",
        "dtypes_report.txt", "loader_rank*.json", "mem_rank*.txt", "mem_rank*.json", "mem_snapshot_rank*.pickle",
        "tensorboard/*",
    ]  # fmt: skip


def test_an_evaluation_is_missed_where_it_was_asked_for(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    assert absent(attempt, (*SUBJECT, "--eval-every", "5"))["evaluation.csv"] == "not reached: no evaluation was done"
    assert "evaluation.csv" not in absent(attempt, (*SUBJECT, "--eval-every", "0"))


def test_a_sharded_run_is_asked_for_the_names_of_the_reports(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    (attempt.path / "k_stats_fsdp.csv").write_text("step\n1\n")
    found = listed(attempt, (*SUBJECT, "--wrapper", "fsdp1"))
    assert found["k_stats_fsdp.csv"].count == 1
    assert {"fallback_counters_fsdp.csv", "dtypes_report_fsdp.txt", "mem_fsdp_rank*.txt"} < set(found)
    assert not {"k_stats.csv", "fallback_counters.csv", "dtypes_report.txt", "mem_rank*.txt"} & set(found)


def test_a_run_that_was_ended_without_stacks_says_so(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    journal(attempt.watch, said("ending", 6.0, ending="deadline"))
    assert absent(attempt)["dumps/rank*.txt"] == "the run ended before stacks could be taken"


def test_what_is_there_is_counted_in_lines_rows_or_files(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    attempt.output.write_text("a\nb\nno end")
    (attempt.path / "training.csv").write_text("step,loss\n1,2\n2,1\n")
    (attempt.path / "k_stats.csv").write_text("")
    attempt.dumps.mkdir()
    for rank in (0, 1):
        (attempt.dumps / f"rank{rank}.1.txt").write_text("x\ny\n")
        (attempt.path / f"heartbeat_rank{rank}.jsonl").write_text("{}\n{}\n")
    found = listed(attempt, SUBJECT)
    counted = {path: one.count for path, one in found.items() if one.absent is None}
    # A plain launch has one log, so no trace file is made of it.
    assert counted == {
        "output.log": 2,
        "traces.log": 0,
        "heartbeat_rank*.jsonl": 4,
        "training.csv": 2,
        "k_stats.csv": 0,
        "dumps/rank*.txt": 2,
    }
    assert found["training.csv"] == Artifact(path="training.csv", count=2, absent=None)
    assert {"training.csv", "traces.log", "k_stats.csv"} & set(listed(attempt)) == {"training.csv"}


def test_a_very_long_file_is_estimated_instead_of_read(tmp_path: Path) -> None:
    attempt = clean(tmp_path)
    with attempt.output.open("wb") as log:
        log.truncate(80 << 20)
    assert listed(attempt)["output.log"].count == 1 << 20


def test_every_artifact_of_a_recorded_run_is_there_or_has_its_reason(tmp_path: Path) -> None:
    attempt = unpack("onestep_passes", tmp_path / "run")
    asked = load_spec(attempt.spec)
    found = listed_of(attempt, asked)
    assert all((one.count is None) == (one.absent is not None) for one in found)
    there = {one.path for one in found if one.absent is None}
    assert there >= {"output.log", "traces.log", "heartbeat_rank*.jsonl", "training.csv", "rank*/flight.json"}


def test_what_the_probe_writes_is_missing_of_a_job_that_was_started_without_it_and_for_no_other_reason(
    tmp_path: Path,
) -> None:
    attempt, asked = clean(tmp_path), spec()
    found = replace(collect(attempt, asked, "n"), is_attached=True)
    reasons = {one.path: one.absent for one in inventory(attempt, found, ())}
    blind = "the probe writes it, and the job was started without the probe"
    assert {path for path, reason in reasons.items() if reason == blind} == {
        "heartbeat_rank*.jsonl",
        "step_ledger.txt",
        "rank*/raised.json",
        "rank*/stacks.txt",
    }
    assert reasons["rank*/flight.json"] == "the job has no flight recorder that can be read from outside"
