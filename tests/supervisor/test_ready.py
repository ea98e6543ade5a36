"""`ready` as a command: launches are made up here, all else is as it runs."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa_harness.commands import ready, session
from nsa_harness.commands.ready import ReadyRequest, run_readiness
from nsa_harness.core.experiment.checklist import PlannedRun
from nsa_harness.core.experiment.readiness import CriterionResult, Decision, Measurement, PhaseRuns, judge_checklist
from nsa_harness.core.outcome.expectations import is_expected
from nsa_harness.core.outcome.outcome import skipped_outcome, unjudged_outcome
from nsa_harness.core.plan import RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Outcome, Status, Usage, Verdict
from nsa_harness.errors import ScenarioError, UsageError
from nsa_harness.supervisor.experiments import cache_key
from nsa_harness.supervisor.experiments.cache_key import Interpreter
from nsa_harness.supervisor.launch.checklists import load_checklist
from nsa_harness.supervisor.launch.scenario_files import shipped_root
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, RunOptions

FACTS = MachineFacts(host="h", cpus=2, gpus=(), torch="2.13.0")
PHASES = (
    ("ready_data",),
    tuple(f"ready_phases@train.phase={phase}" for phase in ("forward", "backward", "step")),
    tuple(f"ready_attention@model.attention={name}" for name in ("nsa", "vanilla")),
    tuple(f"ready_wrappers@parallel.wrapper={name}" for name in ("ddp", "fsdp", "fsdp1", "manual")),
    tuple(f"ready_branches@model.branch={name}" for name in ("cmp", "sel", "win")),
    ("ready_checkpoint", "ready_killed"),
    ("ready_resume",),
    ("ready_load", "ready_data_load"),
    ("ready_synthetic",),
    ("ready_text",),
    ("ready_stable",),
)
SMALL = """
schema: 1
phases:
  - {name: data, runs: [ready_data]}
  - {name: checkpoint, runs: [ready_checkpoint, ready_killed]}
  - {name: resume, runs: [ready_resume], needs: [checkpoint], set: {train.resume: "{ready_killed}/c.pt"}}
  - {name: text, runs: [ready_text], needs: [data]}
criteria:
  throughput: {metric: tokens_per_s_median, in: [ready_checkpoint, ready_text], gt: 50}
"""
RUNS = ["ready_data", "ready_checkpoint", "ready_killed", "ready_resume", "ready_text"]
HEALTHY = {
    "tokens_per_s_median": 900.0, "tokens_per_s_slowest": 700.0, "step_s_median": 0.5, "loss_last": 5.5,
    "optimizer_s": 0.1, "memory_slope_bytes": 10.0, "memory_bytes": 16e9, "replicas_apart": 0.0,
}  # fmt: skip


BATCHES = {"tokens_per_s_median": 1e6}  # of the data pipeline alone


class Killed(BaseException):
    """In the place of SIGKILL: nothing but files outlives it."""


class Machine:
    """Launches nothing: each run ends as it should, with healthy numbers, unless a test says otherwise."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.programs: dict[str, tuple[str, ...]] = {}
        self.specs: dict[str, RunSpec] = {}
        self.numbers: dict[str, dict[str, float]] = {}  # by scenario, in place of the healthy ones
        self.ends: dict[str, tuple[Status, str]] = {}  # with the cause
        self.before: Callable[[str], object] = lambda _: None
        self.finished: dict[str, list[Outcome]] = {}  # by run directory: what lies in it
        self._lock = threading.Lock()

    def __call__(self, spec: RunSpec, attempt: AttemptDir, *, number: int, **_: Any) -> Outcome:
        with self._lock:
            self.launched.append(spec.scenario)
            self.programs[spec.scenario] = spec.program
            self.specs[spec.scenario] = spec
        self.before(spec.scenario)
        planted = (Status.FAIL, "killed") if spec.fault else (Status.PASS, None)
        status, cause = self.ends.get(spec.scenario, planted)
        empty = unjudged_outcome(spec, attempt=number, directory=attempt.path.name, error="")
        steps = float(dict(spec.settings).get("train.steps", "1"))
        load = BATCHES if "data" in spec.scenario else {}
        outcome = replace(
            empty,
            verdict=replace(empty.verdict, status=status, cause=cause, summary="as the test says"),
            expected=is_expected(spec.expect, status, cause),
            metrics={**HEALTHY, "steps": steps, **load, **self.numbers.get(spec.scenario, {})},
            usage=Usage(peak_rss_bytes=400_000_000, peak_gpu_bytes=None, tokens_per_s=900.0),
            spec=replace(empty.spec, not_covered=("nccl",)),
            repeat_command=f"nsa-harness run {attempt.path.name}/spec.json",
        )
        with self._lock:
            self.finished.setdefault(attempt.path.parent.name, []).append(outcome)
        return outcome

    def on_disk(self, run: RunDir) -> list[Outcome]:
        return self.finished.get(run.path.name, [])


def outcome(name: str) -> Outcome:
    """A run that passed."""
    passed = Verdict(status=Status.PASS, kind=None, cause=None, summary="")
    made = skipped_outcome(Skip(scenario=name, about="", reason=""))
    return replace(made, verdict=passed, spec=replace(made.spec, ranks=2))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "run_one", made)
    monkeypatch.setattr(ready, "judge_attempts", made.on_disk)
    monkeypatch.setattr(ready, "machine_facts", lambda: FACTS)
    monkeypatch.setattr(ready, "query_interpreter", lambda *_: Interpreter(version="3.11.7"))
    monkeypatch.setattr(cache_key, "_DIGEST_ROUNDS", 1)
    (tmp_path / MINE).write_text(SMALL)
    return made


MINE = Path("mine.readiness.yaml")
REQUEST = ReadyRequest(
    shape="ci", overrides=(), checklist=MINE, jobs=1, options=RunOptions(command="nsa-harness ready ci")
)


def checked(**changes: Any) -> tuple[int, dict[str, Any], Path]:
    """As typed once: its exit code, its record and its folder."""
    code = run_readiness(replace(REQUEST, **changes))
    run = Path("reports/latest").resolve()
    return code, json.loads((run / "readiness.json").read_text()), run


def results(record: dict[str, Any], what: str) -> dict[str, str]:
    return {row["name"]: row["result"] for row in record[what]}


def test_go_after_every_phase_in_order_with_what_this_machine_lacks_beside_it(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record, run = checked(checklist=None)
    assert (code, record["verdict"], record["ended"], record["schema"]) == (0, "GO", True, 1)
    runs = iter(machine.launched)
    assert [{next(runs) for _ in phase} for phase in PHASES] == [set(phase) for phase in PHASES]
    assert set(results(record, "phases").values()) == {"met"}
    assert results(record, "criteria") == {
        name: "not tested" if name.startswith("gpu_") else "met" for name in results(record, "criteria")
    }
    assert [one["what"] for one in record["not_tested"]] == [
        "gpu_memory",
        "gpu_memory_at_end",
        "nccl",
        "sequence 4096",
        "50000 steps",
    ]
    resumed = machine.programs["ready_resume"]
    assert resumed[resumed.index("--resume") + 1] == f"reports/{run.name}/ready_killed"
    text = (run / "READINESS.md").read_text()
    assert text.startswith(
        "# GO · ready ci\n\n**12 of 14 criteria met, none missed; gpu_memory, gpu_memory_at_end, nccl, sequence"
    )
    assert "Planned run: 50000 steps, sequence 4096." in text
    assert "| memory_at_end | **met** | 0.05006 of a rank's memory | &lt; 0.9 of a rank's memory | 94% |" in text
    said = capsys.readouterr().out
    assert said.rstrip().splitlines()[-2].startswith("GO  ready ci   12 of 14 criteria met, none missed")
    assert "11/11  stable   500 steps without a failure" in said
    assert (run / "SUMMARY.md").exists()


MISSED: list[tuple[str, str, dict[str, float]]] = [
    ("host_memory", "ready_synthetic", {"peak_rss_bytes": 12e9}),
    ("throughput", "ready_text", {"tokens_per_s_median": 49.0}),
    ("slowest_step", "ready_stable", {"tokens_per_s_slowest": 25.0}),
    ("synthetic_steps", "ready_synthetic", {"steps": 199.0}),
    ("text_steps", "ready_text", {"steps": 299.0}),
    ("stable_steps", "ready_stable", {"steps": 499.0}),
    ("memory_at_end", "ready_stable", {"memory_slope_bytes": 162e3}),
    ("replicas_equal", "ready_stable", {"replicas_apart": 1.0}),
    ("attention_cost", "ready_attention@model.attention=nsa", {"step_s_median": 50.0}),
    ("wrappers_alike", "ready_wrappers@parallel.wrapper=fsdp", {"loss_last": 5.6}),
    ("resumed_alike", "ready_resume", {"loss_last": 5.51}),
    ("data_headroom", "ready_data_load", {"tokens_per_s_median": 1000.0}),
    ("gpu_memory", "ready_text", {"peak_gpu_bytes": 30e9}),
    ("gpu_memory_at_end", "ready_stable", {"gpu_slope_bytes": 200e3}),
]


def test_each_criterion_of_the_shipped_checklist_is_met_and_can_be_missed() -> None:
    """On a machine with GPUs, where all of them are asked."""
    asked = load_checklist(None, Path.cwd()).checklist
    assert [name for name, _, _ in sorted(MISSED)] == sorted(asked.criteria)
    usual = {**HEALTHY, "steps": 500.0, "peak_rss_bytes": 4e8, "peak_gpu_bytes": 2e10, "gpu_slope_bytes": 0.0}
    for name, scenario, numbers in [("", "", {}), *MISSED]:
        measured = {run: {**usual, **(BATCHES if "data" in run else {})} for phase in PHASES for run in phase}
        measured.get(scenario, {}).update(numbers)
        done = [
            PhaseRuns(
                names=phase,
                outcomes=tuple(outcome(run) for run in phase),
                numbers={run: {key: Measurement(value=one) for key, one in measured[run].items()} for run in phase},
            )
            for phase in PHASES
        ]
        found = judge_checklist(asked, done, replace(FACTS, gpus=("A100", "A100")))
        missed = [(row.name, row.run) for row in found.criteria if row.result is not CriterionResult.MET]
        assert (found.decision, missed) == ((Decision.NO_GO, [(name, scenario)]) if name else (Decision.GO, [])), name


def test_runs_that_must_go_on_together_do_so_on_devices_for_one_of_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "machine_facts", lambda: replace(FACTS, gpus=("A100", "A100")))
    both = threading.Barrier(2, timeout=60)
    machine.before = lambda _: both.wait()
    MINE.write_text(
        "{schema: 1, phases: [{name: load, runs: [ready_load, ready_data_load], together: must}],"
        " criteria: {steps: {metric: steps, in: [ready_load], ge: 20}}}"
    )
    assert checked()[0] == 0


def test_a_missed_number_is_named_first_with_its_run_and_what_needed_its_phase_is_not_reached(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.numbers["ready_checkpoint"] = {"tokens_per_s_median": 31.0}
    code, record, run = checked()
    assert (code, record["verdict"]) == (1, "NO-GO")
    (row,) = record["criteria"]
    assert (row["run"], row["margin"], row["blame"]["next"]) == (
        "ready_checkpoint", pytest.approx(-0.38), "nsa-harness run ready_checkpoint/spec.json",
    )  # fmt: skip
    assert results(record, "phases") == {"data": "met", "checkpoint": "missed", "resume": "not reached", "text": "met"}
    assert "ready_resume" not in machine.launched
    assert (
        (run / "READINESS.md")
        .read_text()
        .startswith(
            "# NO-GO · ready ci\n\n**throughput: 31 in ready_checkpoint, limit > 50.**\n\n## Cause: ready_checkpoint"
        )
    )
    said = capsys.readouterr().out
    assert said.rstrip().splitlines()[-1] == "NO-GO  ready ci   throughput: 31 in ready_checkpoint, limit > 50"
    assert "not reached: resume, because checkpoint failed" in said


def test_a_run_that_fails_is_told_with_its_cause(machine: Machine) -> None:
    machine.ends["ready_data"] = (Status.HANG, "starved")
    code, record, run = checked()
    assert (code, results(record, "phases")["text"]) == (1, "not reached")
    text = (run / "READINESS.md").read_text()
    assert "**ready_data ended with HANG (starved).**" in text
    assert "HANG, starved: As the test says." in text


def test_a_run_that_nobody_could_judge_leaves_it_undecided(machine: Machine) -> None:
    machine.ends["ready_text"] = (Status.ERROR, "harness_error")
    code, record, _ = checked()
    assert (code, record["verdict"], record["ended"]) == (125, "UNDECIDED", True)
    assert results(record, "phases")["text"] == "open"


def stopped_at(machine: Machine, scenario: str, stop: Callable[[], None]) -> None:
    def before(name: str) -> None:
        if name == scenario:
            machine.before = lambda _: None
            stop()

    machine.before = before


def kill() -> None:
    raise Killed


def killed_at(machine: Machine, scenario: str) -> list[str]:
    """What had been launched by then."""
    stopped_at(machine, scenario, kill)
    with pytest.raises(Killed):
        checked()
    launched = list(machine.launched)
    machine.launched.clear()
    return launched


def test_killed_it_goes_on_and_repeats_no_finished_run(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert killed_at(machine, "ready_resume") == RUNS[:4]
    cut = json.loads(Path("reports/latest/readiness.json").read_text())
    assert (cut["verdict"], cut["ended"]) == ("UNDECIDED", False)
    code, record, run = checked()
    assert (code, record["verdict"], len(list(Path("reports").glob("2*")))) == (0, "GO", 1)
    assert machine.launched == RUNS[3:]
    assert f"continues reports/{run.name}: 3 runs already finished" in " ".join(capsys.readouterr().out.split())


def test_ctrl_c_tells_what_is_known_and_the_same_command_goes_on(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.ends["ready_checkpoint"] = (Status.FAIL, "interrupted")
    stopped_at(machine, "ready_checkpoint", lambda: os.kill(os.getpid(), signal.SIGINT))
    code, record, first = checked()
    assert (code, record["verdict"], record["ended"]) == (130, "UNDECIDED", False)
    assert results(record, "phases")["checkpoint"] == "open"
    machine.ends.clear()
    assert "interrupted; the same command continues it: nsa-harness ready ci" in capsys.readouterr().out
    code, record, second = checked()
    assert (code, record["verdict"], second) == (0, "GO", first)
    assert machine.launched == [*RUNS[:2], *RUNS[1:]]


def test_a_scenario_that_is_edited_between_begins_anew_and_is_named(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_at(machine, "ready_text")
    Path("scenarios").mkdir()
    source = (shipped_root() / "ready/ready_text.yaml").read_text()
    Path("scenarios/ready_text.yaml").write_text(source.replace("steps: 300", "steps: 400"))
    assert (checked()[0], machine.launched) == (0, RUNS)
    said = " ".join(capsys.readouterr().out.split())
    assert "phase text has changed since the check in reports/" in said
    assert "; a new check starts" in said


def test_criteria_that_are_edited_between_are_asked_of_the_runs_that_were_made(machine: Machine) -> None:
    killed_at(machine, "ready_resume")
    MINE.write_text(SMALL.replace("gt: 50", "gt: 1000"))
    code, record, _ = checked()
    assert (code, machine.launched) == (1, ["ready_text"])
    assert results(record, "criteria") == {"throughput": "missed"}
    assert results(record, "phases")["resume"] == "not reached"


def test_words_are_laid_upon_every_scenario_and_what_a_phase_sets_upon_these(machine: Machine) -> None:
    MINE.write_text(SMALL.replace("runs: [ready_text], needs", "runs: [ready_text], set: {train.seed: 9}, needs"))
    checked(overrides=("train.seed=7",))
    seeds = {name: words[words.index("--seed") + 1] for name, words in machine.programs.items()}
    assert seeds == {name: "9" if name == "ready_text" else "7" for name in RUNS}


def test_a_leak_is_measured_against_the_planned_steps_and_the_memory(machine: Machine) -> None:
    machine.numbers["ready_stable"] = {"memory_slope_bytes": 150e3}
    code, record, _ = checked(checklist=None)
    assert (code, record["planned"]) == (1, {"steps": 50000, "seq_len": 4096, "nodes": 1})
    assert results(record, "criteria")["memory_at_end"] == "missed"
    code, record, _ = checked(checklist=None, planned=("steps=10000", "seq_len=128"))
    assert (code, record["planned"]) == (0, {"steps": 10000, "seq_len": 128, "nodes": 1})


def test_the_runs_use_the_planned_ranks_if_they_fit_and_say_so_if_not(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "machine_facts", lambda: replace(FACTS, cpus=8))
    _, record, _ = checked(planned=("ranks=4",))
    assert machine.specs["ready_text"].ranks == 4
    assert record["not_tested"] == [{"what": "nccl", "why": "this machine has no GPU"}]
    _, record, _ = checked(planned=("ranks=64", "nodes=8"))
    assert [one["what"] for one in record["not_tested"]] == ["nccl", "64 ranks", "8 nodes"]


@pytest.mark.parametrize("word", ["step=5", "steps", "steps=many", "nodes=0"])
def test_a_planned_run_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="--planned"):
        ready.planned_run(PlannedRun(), (word,))


@pytest.mark.usefixtures("machine")
def test_json_is_the_record_alone(capsys: pytest.CaptureFixture[str]) -> None:
    checked(options=replace(REQUEST.options, json=True))
    said = capsys.readouterr()
    assert json.loads(said.out)["verdict"] == "GO"
    assert "GO  ready ci" in said.err


def test_every_mistake_of_a_checklist_is_told_at_its_place_before_anything_is_launched(machine: Machine) -> None:
    def mistakes(text: str) -> list[str]:
        MINE.write_text(text)
        with pytest.raises(ScenarioError) as told:
            checked()
        return [one.replace(f"{MINE}:", "") for one in told.value.mistakes]

    assert mistakes(SMALL.replace("name: text", "nane: text").replace(", gt: 50", "")) == [
        "7:5: phases.3.name: is required",
        '7:6: phases.3.nane: unknown key; did you mean "name"?',
        "9:3: criteria.throughput: expected at least one bound: lt, le, gt, ge or eq",
    ]
    assert mistakes(SMALL.replace("needs: [data]", "needs: [dota]").replace("name: resume", "name: data")) == [
        "6:6: phases.2.name: data is the name of an earlier phase; rename one",
        '7:46: phases.3.needs.0: dota is no earlier phase; did you mean "data"?',
    ]
    assert mistakes(SMALL.replace("[ready_data]", "[ready_dota]").replace("[ready_text],", "[ready_toxt],")) == [
        '4:25: phases.0.runs.0: no scenario named "ready_dota"; did you mean "ready_data"?',
        '7:25: phases.3.runs.0: no scenario named "ready_toxt"; did you mean "ready_text"?',
    ]
    assert mistakes(SMALL.replace("{ready_killed}", "{ready_text}").replace("in: [ready_c", "in: [c")) == [
        "6:69: phases.2.set.train.resume: {ready_text} is no run of an earlier phase",
        '9:50: criteria.throughput.in.0: checkpoint is the run of no phase; did you mean "ready_checkpoint"?',
    ]
    assert mistakes(SMALL.replace("train.resume:", "train.resum:")) == [
        '6:69: train.resum: unknown key; did you mean "resume"?'
    ]
    with pytest.raises(UsageError, match="no shape 'cii'; did you mean \"ci\""):
        checked(shape="cii")
    assert machine.launched == []
