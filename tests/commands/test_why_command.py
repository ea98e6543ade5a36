"""`nsa-harness why` as a user gives it; the launches and the analysis of their recordings are replaced."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from core.runs import run
from render.why_samples import EXPLANATION

from nsa_harness.cli.main import run_command_line
from nsa_harness.commands import session, why
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.recording.explanation import (
    Candidate,
    ExperimentKind,
    ExperimentResult,
    OriginKind,
    PlannedExperiment,
)
from nsa_harness.core.recording.judgement import Judgement
from nsa_harness.core.report import Culprit, MachineFacts, Outcome, Place, Status, Timing
from nsa_harness.render.documents.report_json import from_json
from nsa_harness.render.documents.schemas import Document, json_schema
from nsa_harness.supervisor.experiments import cache_key
from nsa_harness.supervisor.experiments.cache_key import Interpreter
from nsa_harness.supervisor.launch.planning import Invocation, Script, plan_launches
from nsa_harness.supervisor.storage.record import write_spec
from nsa_harness.supervisor.storage.rundir import AttemptDir, create_run

PASS, FAIL, HANG, _, ERROR = Status.PASS, Status.FAIL, Status.HANG, Status.SKIP, Status.ERROR
FACTS = MachineFacts(host="h", cpus=2, gpus=(), torch="2.13.0")
_COMMAND_LINE = cache(typer.main.get_command)
PROGRAM = "import torch\nbad = 0\nbad += 1\nif bad >= 3:\n    print(bad)\n"


class Launched:
    """In place of the launch: the runs end as the test says, one after another."""

    def __init__(self) -> None:
        self.ends: list[Status] = []
        self.specs: list[RunSpec] = []
        self.cause = "uneven_inputs"
        self.on_launch: Callable[[], None] = lambda: None

    def __call__(self, spec: RunSpec, attempt: AttemptDir, **options: Any) -> Outcome:
        attempt.path.mkdir()
        write_spec(attempt, spec)
        self.specs.append(spec)
        self.on_launch()
        status = self.ends.pop(0)
        place = Place(file=str(Path("train.py").resolve()), line=4)
        culprit = Culprit(ranks=(1,), step=1, collective=None, place=place) if status in (FAIL, HANG) else None
        made = run(
            spec.scenario, status, spec_hash=spec.spec_hash, attempt=options["number"], dir=attempt.path.name,
            culprit=culprit, **({"cause": self.cause} if culprit else {}),
        )  # fmt: skip
        return replace(
            made, timing=Timing(launch_s=1.0, wall_s=5.0, no_progress_s=None, detected_s=None, teardown_s=0.1)
        )

    @property
    def recordings(self) -> list[Any]:
        return [json.loads(dict(spec.env)["_NSA_HARNESS_RECORD"]) for spec in self.specs]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("NSA_", "TORCH_BACKEND"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "100")
    made = Launched()
    monkeypatch.setattr(session, "run_one", made)
    monkeypatch.setattr(why, "query_interpreter_of", lambda *_: Interpreter(version="3.11.7"))
    monkeypatch.setattr(cache_key, "query_interpreter", lambda *_: Interpreter(version="3.11.7"))
    monkeypatch.setattr("typer.main.get_command", _COMMAND_LINE)
    monkeypatch.setattr(why, "machine_facts", lambda: FACTS)
    monkeypatch.setattr(why, "end_dead_runs", lambda: None)
    monkeypatch.setattr(why, "stored_explanation", lambda *_: EXPLANATION)
    monkeypatch.setattr(why, "load_recordings", lambda *_: ((), ()))
    monkeypatch.setattr(why, "plan_experiments", lambda *_: ())
    return made


@pytest.fixture
def stored(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes a stored run of train.py whose attempts ended so."""

    def make(*ends: Status, command: str = "nsa-harness run train.py", program: str = PROGRAM, ranks: int = 3) -> str:
        made = create_run(Path("reports"))
        Path("train.py").write_text(program)
        question = Invocation(
            arguments=(), script=Script(file="train.py", ranks=ranks, args=()), working_dir=Path.cwd(), environ={}
        )
        (spec,) = plan_launches(question, FACTS).specs
        assert isinstance(spec, RunSpec)
        launched.ends = [*ends]
        outcomes = [launched(spec, made.attempt("train", number), number=number) for number in range(1, len(ends) + 1)]
        monkeypatch.setattr(why, "judge_attempts", lambda _: [replace(one, expected=False) for one in outcomes])
        record = {"command": command, "harness": "1", "machine": vars_of(FACTS), "controller": 1, "plan": []}
        made.directory.write(made.record, json.dumps({"schema": 1, **record}))
        launched.specs.clear()
        return str(made.path)

    return make


def vars_of(facts: MachineFacts) -> dict[str, Any]:
    return {"host": facts.host, "cpus": facts.cpus, "gpus": list(facts.gpus), "torch": facts.torch}


def experiment(kind: ExperimentKind, candidate: int = 0) -> PlannedExperiment:
    place = Place(file=str(Path("train.py").resolve()), line=3)
    return PlannedExperiment(
        kind=kind, candidate=candidate, place=place, name="bad", instruction={"kind": kind.value, "line": 3},
        proves_origin=kind is not ExperimentKind.FORCE_BRANCH,
    )  # fmt: skip


def judge_as(monkeypatch: pytest.MonkeyPatch, *results: ExperimentResult) -> None:
    waiting = [*results]

    def judge(*_: Any, **__: Any) -> Judgement:
        return Judgement(result=waiting.pop(0), refused=())

    monkeypatch.setattr(why, "judge_experiment", judge)


def answer() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(Path("reports/latest/why.json").read_text())
    jsonschema.Draft202012Validator(json_schema(Document.WHY)).validate(value)
    return value


def test_the_answer_leads_from_the_origin_to_the_effect(
    launched: Launched, stored: Callable[..., str], capsys: Any
) -> None:
    run_dir = stored(HANG)
    launched.ends = [HANG]
    assert run_command_line(["why", run_dir]) == 0
    out = capsys.readouterr().out
    assert out.index("effects  the program does everything again") < out.index("  1  recorded    HANG")
    told = " ".join(out.split())
    assert "at most 8 runs, to record it, then to test the answer by experiments; the failed run took 5.0 s" in told
    assert "train.py:52 takes `self.bad` from this rank's own data, and no collective makes it equal" in told
    assert "(step 33), `self.bad` is 3 on rank 2 and 1 on ranks 0, 1. Line 61, `self.bad >= self.patience`" in told
    assert "do Reduce `self.bad` over the ranks" in told
    assert "No experiment was made: the origin is likely, not certain." in told
    assert launched.recordings == [{"values": True, "experiment": None}]
    assert launched.specs[0].cwd == str(Path.cwd())
    stored_answer = answer()
    assert (stored_answer["result"], stored_answer["origin"], stored_answer["first"]["cause"]) == (
        "likely", 0, "uneven_inputs",
    )  # fmt: skip
    report = json.loads(Path("reports/latest/report.json").read_text())
    assert report["detail"]["why"] == stored_answer
    jsonschema.Draft202012Validator(json_schema(Document.REPORT)).validate(report)
    assert from_json(json.dumps(report)).run_id == report["run_id"]
    summary = Path("reports/latest/SUMMARY.md").read_text()
    page = Path("reports/latest/report.html").read_text()
    for text in ("takes <code>self.bad</code> from this rank", "Values that differ or decide"):
        assert text in page
    assert "## Why train of" in summary
    assert "| train.py:61 |" in summary
    assert run_command_line(["report", "reports/latest"]) in (0, 124, 125)
    assert "## Why train of" in Path("reports/latest/SUMMARY.md").read_text()


def test_an_experiment_that_lets_the_run_go_on_makes_the_answer_certain(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run_dir = stored(HANG)
    planned = (experiment(ExperimentKind.SHARE_GENERATOR, 1), experiment(ExperimentKind.SET_VALUE))
    monkeypatch.setattr(why, "plan_experiments", lambda *_: planned)
    judge_as(monkeypatch, ExperimentResult.FAILED, ExperimentResult.WENT_ON)
    launched.ends = [HANG, HANG, PASS, HANG]
    assert run_command_line(["why", run_dir]) == 0
    assert [recording["experiment"] for recording in launched.recordings] == [
        None, {"kind": "share_generator", "line": 3}, {"kind": "set_value", "line": 3},
        {"kind": "set_value", "line": 3, "control": True},
    ]  # fmt: skip
    out = " ".join(capsys.readouterr().out.split())
    assert "ANSWER value computed from rank-local data at train.py:52 · certain, by experiment (4 runs, 20.0 s)" in out
    assert "Unchanged, the program failed in 2 of 2 recorded runs (train, train~4)." in out
    assert "When all ranks got the value of rank 0 (`bad` at train.py:3), every rank went on (train~3)." in out
    assert "the program failed nevertheless (train~2): train.py:48 is dropped." in out
    assert (answer()["result"], answer()["origin"], answer()["dropped"]) == ("certain", 0, [1])
    assert run_command_line(["why", "--patch", "reports/latest"]) == 0
    patch = capsys.readouterr().out
    assert "--- a/train.py\n+++ b/train.py\n" in patch
    assert "+shared = [bad]\n+torch.distributed.broadcast_object_list(shared, src=0)\n+bad = shared[0]\n" in patch
    assert Path("train.py").read_text() == PROGRAM


def test_the_line_that_an_experiment_proves_is_the_answer_although_no_candidate_named_it(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = stored(HANG)
    planned = experiment(ExperimentKind.FORCE_BRANCH)
    handler = Candidate(place=planned.place, kind=OriginKind.EXCEPTION, ranks=(2,))
    planned = replace(planned, origin=handler, proves_origin=True, is_of_decision=True)
    monkeypatch.setattr(why, "plan_experiments", lambda *_: (planned,))
    judge_as(monkeypatch, ExperimentResult.WENT_ON)
    launched.ends = [HANG, PASS, HANG]
    assert run_command_line(["why", run_dir]) == 0
    told = answer()
    assert told["result"] == "certain"
    assert told["origin"] == len(told["explanation"]["candidates"]) - 1
    assert told["explanation"]["candidates"][-1]["place"]["line"] == planned.place.line


def test_a_change_of_the_decision_that_fails_drops_no_candidate(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = stored(HANG)
    planned = replace(experiment(ExperimentKind.FORCE_BRANCH), is_of_decision=True, proves_origin=False)
    monkeypatch.setattr(why, "plan_experiments", lambda *_: (planned,))
    judge_as(monkeypatch, ExperimentResult.FAILED)
    launched.ends = [HANG, HANG]
    assert run_command_line(["why", run_dir]) == 0
    assert (answer()["result"], answer()["origin"], answer()["dropped"]) == ("likely", 0, [])


@pytest.mark.parametrize(
    ("kind", "result", "proof"),
    [
        (ExperimentKind.UNDO_LEAK, ExperimentResult.FAILED, "none"),  # another extra call may have the same effect
        (ExperimentKind.UNDO_LEAK, ExperimentResult.INCONCLUSIVE, "none"),  # every rank may make the call
        (ExperimentKind.SET_VALUE, ExperimentResult.FAILED, "dropped"),
        (ExperimentKind.SET_VALUE, ExperimentResult.INCONCLUSIVE, "otherwise"),
        (ExperimentKind.SET_VALUE, ExperimentResult.NOT_MADE, "none"),
    ],
)
def test_an_experiment_that_proves_nothing_says_what_it_shows(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch, kind: ExperimentKind,
    result: ExperimentResult, proof: str,
) -> None:  # fmt: skip
    run_dir = stored(HANG)
    monkeypatch.setattr(why, "plan_experiments", lambda *_: (experiment(kind),))
    judge_as(monkeypatch, result)
    launched.ends = [HANG, HANG]
    run_command_line(["why", run_dir])
    assert [one["proof"] for one in answer()["runs"]] == ["none", proof]


def test_a_second_cause_saves_the_experiments_on_the_decision(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = stored(HANG)
    decision = replace(experiment(ExperimentKind.FORCE_BRANCH), is_of_decision=True)
    monkeypatch.setattr(why, "plan_experiments", lambda *_: (experiment(ExperimentKind.SET_VALUE), decision))
    judge_as(monkeypatch, ExperimentResult.SECOND_CAUSE)
    launched.ends = [HANG, HANG]
    run_command_line(["why", run_dir])
    assert [one["proof"] for one in answer()["runs"]] == ["none", "second_cause"]


def test_a_forced_branch_proves_the_decision_only(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run_dir = stored(HANG)
    monkeypatch.setattr(why, "plan_experiments", lambda *_: (experiment(ExperimentKind.FORCE_BRANCH),))
    judge_as(monkeypatch, ExperimentResult.WENT_ON)
    launched.ends = [HANG, PASS, HANG]
    assert run_command_line(["why", run_dir]) == 0
    assert answer()["result"] == "decision"
    assert "this proves the decision, not its origin" in capsys.readouterr().out


def test_a_control_run_that_passes_takes_the_proof_back(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run_dir = stored(HANG)
    monkeypatch.setattr(why, "plan_experiments", lambda *_: (experiment(ExperimentKind.SET_VALUE),) * 2)
    judge_as(monkeypatch, ExperimentResult.WENT_ON)
    launched.ends = [HANG, PASS, PASS]
    assert run_command_line(["why", run_dir]) == 0
    assert answer()["result"] == "likely"
    assert [one["proof"] for one in answer()["runs"]] == ["none", "race", "none"]
    assert "The program fails only sometimes (1 of 2 unchanged runs)" in " ".join(capsys.readouterr().out.split())


def test_two_causes_at_once_leave_the_origin_likely(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run_dir = stored(HANG)
    monkeypatch.setattr(why, "plan_experiments", lambda *_: (experiment(ExperimentKind.SET_VALUE),))
    judge_as(monkeypatch, ExperimentResult.SECOND_CAUSE)
    launched.ends = [HANG, HANG]
    assert run_command_line(["why", run_dir]) == 0
    assert answer()["result"] == "likely"
    assert "Two causes: without this difference the run fails later" in " ".join(capsys.readouterr().out.split())


def test_without_experiments_and_values_neither_is_made(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run_dir = stored(HANG)
    monkeypatch.setattr(why, "plan_experiments", lambda *_: (experiment(ExperimentKind.SET_VALUE),))
    launched.ends = [HANG]
    assert run_command_line(["why", run_dir, "--no-experiment", "--no-values"]) == 0
    assert launched.recordings == [{"values": False, "experiment": None}]
    out = " ".join(capsys.readouterr().out.split())
    assert "at most 2 runs, to record it; the failed run took 5.0 s" in out
    assert "but no values" in out


@pytest.mark.parametrize(
    ("ends", "code", "result", "said"),
    [
        ([PASS, PASS], 125, "passed", "NOT REPEATED 0 of 2 recorded runs failed in this way"),
        ([FAIL, FAIL], 125, "otherwise", "0 of 2 recorded runs failed in this way, 2 failed otherwise"),
        ([ERROR, ERROR], 125, "undecided", "UNDECIDED no recorded run was finished and judged"),
        ([PASS, HANG], 0, "likely", "The program fails only sometimes (1 of 2 unchanged runs)"),
    ],
)
def test_a_failure_that_does_not_come_again_is_told_with_its_rate(
    launched: Launched, stored: Callable[..., str], capsys: Any, ends: list[Status], code: int, result: str, said: str
) -> None:
    run_dir = stored(HANG)
    launched.ends = [*ends]
    assert run_command_line(["why", run_dir]) == code
    out = " ".join(capsys.readouterr().out.split())
    assert said in out
    assert answer()["result"] == result
    assert ("--repeat 5" in out) == (result in ("passed", "otherwise"))


def test_no_experiment_is_made_where_the_same_program_also_passes(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run_dir = stored(PASS, HANG)
    monkeypatch.setattr(why, "plan_experiments", lambda *_: (experiment(ExperimentKind.SET_VALUE),))
    launched.ends = [HANG]
    assert run_command_line(["why", run_dir]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 attempts of that run passed, so an experiment would prove nothing" in out
    assert len(launched.specs) == 1


def test_no_experiment_is_made_with_a_program_that_writes_to_a_shared_service(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run_dir = stored(HANG, program=f"import psycopg2.extras\n{PROGRAM}")
    monkeypatch.setattr(why, "plan_experiments", lambda *_: (experiment(ExperimentKind.SET_VALUE),))
    launched.ends = [HANG]
    assert run_command_line(["why", run_dir]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "because the program uses the database psycopg2; no experiment is made without --experiment" in out
    assert len(launched.specs) == 1
    judge_as(monkeypatch, ExperimentResult.WENT_ON)
    launched.ends = [HANG, PASS, HANG]
    assert run_command_line(["why", run_dir, "--experiment"]) == 0
    assert "certain, by experiment" in capsys.readouterr().out


def test_the_line_of_a_lock_stands(launched: Launched, stored: Callable[..., str], capsys: Any) -> None:
    launched.cause = "lock_cycle"
    run_dir = stored(HANG)
    launched.ends = [HANG]
    assert run_command_line(["why", run_dir]) == 0
    out = capsys.readouterr().out
    assert "the line of the first run stands" in out
    assert "at most 2 runs, to record it;" in out
    assert answer()["result"] == "first_line"


def test_nothing_found_has_another_exit_code(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = stored(HANG)
    monkeypatch.setattr(why, "stored_explanation", lambda *_: replace(EXPLANATION, candidates=()))
    launched.ends = [HANG]
    assert run_command_line(["why", run_dir]) == 1
    assert answer()["result"] == "not_explained"


def test_an_interrupted_question_continues_with_the_same_command(
    launched: Launched, stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run_dir = stored(HANG)
    monkeypatch.setattr(why, "plan_experiments", lambda *_: (experiment(ExperimentKind.SET_VALUE),))
    judge_as(monkeypatch, ExperimentResult.WENT_ON, ExperimentResult.WENT_ON)
    recorded = run("train", HANG, cause="uneven_inputs", dir="train")
    monkeypatch.setattr("nsa_harness.commands.experiment.judge_again", lambda _, dirs: dict.fromkeys(dirs, recorded))
    launched.ends = [HANG]
    assert run_command_line(["why", run_dir, "--budget", "1run"]) == 0
    first = Path("reports/latest").resolve()
    assert answer()["result"] == "likely"
    launched.ends = [PASS, HANG]
    assert run_command_line(["why", run_dir, "--budget", "3runs"]) == 0
    assert Path("reports/latest").resolve() == first
    assert "1 run already finished" in capsys.readouterr().out
    assert (answer()["result"], len(answer()["runs"])) == ("certain", 3)
    launched.ends = [PASS, PASS]
    assert run_command_line(["why"]) == 125, "a run of why stands for the run that it explains"
    assert Path("reports/latest").resolve() != first
    assert answer()["first"]["path"] == str(Path(run_dir).resolve())


def test_programs_read_the_answer_as_the_last_event_and_people_read_stderr(
    launched: Launched, stored: Callable[..., str], capsys: Any
) -> None:
    run_dir = stored(HANG)
    launched.ends = [HANG]
    assert run_command_line(["why", run_dir, "--json"]) == 0
    told = capsys.readouterr()
    events = [json.loads(line) for line in told.out.splitlines()]
    schema = jsonschema.Draft202012Validator(json_schema(Document.EVENTS))
    assert [error.message for event in events for error in schema.iter_errors(event)] == []
    assert (events[-1]["event"], events[-1]["exit_code"], events[-1]["why"]) == ("done", 0, answer())
    assert "ANSWER  value computed from rank-local data" in told.err


def test_a_dry_run_says_what_would_be_launched(launched: Launched, stored: Callable[..., str], capsys: Any) -> None:
    run_dir = stored(HANG)
    assert run_command_line(["why", run_dir, "--dry-run", "--python", "/usr/bin/python3"]) == 0
    out = capsys.readouterr().out
    assert "launched nothing" in out
    assert "/usr/bin/python3" in out
    assert launched.specs == []


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"ends": [PASS]}, "nothing failed in this run, so there is nothing to explain"),
        ({"ends": [HANG], "ranks": 1}, "this program has one rank"),
        ({"ends": [HANG], "command": "nsa-harness watch -- torchrun train.py"}, "only observed this job"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    launched: Launched, stored: Callable[..., str], capsys: Any, made: dict[str, Any], said: str
) -> None:
    run_dir = stored(*made.pop("ends"), **made)
    assert run_command_line(["why", run_dir]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert launched.specs == []


def test_an_old_python_and_a_missing_program_are_refused(
    stored: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run_dir = stored(HANG)
    monkeypatch.setattr(why, "query_interpreter_of", lambda *_: Interpreter(version="3.9.2"))
    assert run_command_line(["why", run_dir]) == 2
    assert "is Python 3.9.2; recording needs Python 3.11 or newer" in " ".join(capsys.readouterr().err.split())
    Path("train.py").unlink()
    assert run_command_line(["why", run_dir]) == 2
    assert "no file train.py in" in capsys.readouterr().err
    assert run_command_line(["why", "--patch", run_dir]) == 2
    assert "this run has no answer of `why`" in " ".join(capsys.readouterr().err.split())
    assert run_command_line(["why", run_dir, "--budget", "soon"]) == 2
