"""`nsa-harness claim` and `run --verify` as a user gives them; only the launch itself is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from core.runs import run
from filelock import FileLock

from nsa_harness.cli.main import run_command_line
from nsa_harness.commands import claim, experiment, session, verify
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import Culprit, MachineFacts, Outcome, Place, Status, Timing
from nsa_harness.render.documents.schemas import Document, json_schema
from nsa_harness.supervisor.experiments import cache_key
from nsa_harness.supervisor.experiments.cache_key import Interpreter
from nsa_harness.supervisor.launch.planning import Invocation, Script, plan_launches
from nsa_harness.supervisor.storage import ledger as store
from nsa_harness.supervisor.storage.ledger import NAME, read_ledger
from nsa_harness.supervisor.storage.record import write_spec
from nsa_harness.supervisor.storage.rundir import AttemptDir, create_run

PASS, FAIL, HANG, _, ERROR = Status
KEY = "parallel.find_unused_parameters"
FACTS = MachineFacts(host="h", cpus=2, gpus=(), torch="2.13.0")
_COMMAND_LINE = cache(typer.main.get_command)  # made anew by each command it takes as long as a small run
WITHOUT_FIRST = 4059  # with this seed, the first twelve pairs begin without the change
CLAIM = ("claim", "ddp_onestep", f"{KEY}=false,true")


class Launched:
    """In place of the launch: each side ends as the test says, and leaves the files that it says."""

    def __init__(self) -> None:
        self.ends: dict[str, list[Status]] = {}
        self.leaves: Callable[[RunSpec, AttemptDir], None] = lambda *_: None
        self.asked: list[str] = []
        self.place: Place | None = Place(file="train.py", line=4)
        self.cause: str | None = None

    def __call__(self, spec: RunSpec, attempt: AttemptDir, **options: Any) -> Outcome:
        attempt.path.mkdir()
        write_spec(attempt, spec)
        self.leaves(spec, attempt)
        self.asked.append(spec.scenario)
        ends = next((ends for word, ends in self.ends.items() if word in spec.scenario), [PASS])
        status = ends.pop(0) if len(ends) > 1 else ends[0]
        culprit = Culprit(ranks=(1,), step=1, collective=None, place=self.place) if status in (FAIL, HANG) else None
        made = run(
            spec.scenario, status, spec_hash=spec.spec_hash, attempt=options["number"], dir=attempt.path.name,
            culprit=culprit, **({"cause": self.cause} if self.cause and culprit else {}),
        )  # fmt: skip
        return replace(
            made, timing=Timing(launch_s=1.0, wall_s=5.0, no_progress_s=None, detected_s=None, teardown_s=0.1)
        )


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("NSA_", "TORCH_BACKEND"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "100")
    made = Launched()
    monkeypatch.setattr(session, "run_one", made)
    monkeypatch.setattr(cache_key, "query_interpreter", lambda *_: Interpreter(version="3.11.7"))
    monkeypatch.setattr(experiment, "describe", lambda *_, **__: {"git": {"commit": "1a2b3c4d5e6f", "dirty": True}})
    monkeypatch.setattr("typer.main.get_command", _COMMAND_LINE)
    monkeypatch.setattr(claim, "draw_order_seed", lambda: WITHOUT_FIRST)
    monkeypatch.setattr("nsa_harness.supervisor.launch.machine.machine_facts", lambda: FACTS)
    monkeypatch.setattr(verify, "machine_facts", lambda: FACTS)
    for command in (claim, verify):
        monkeypatch.setattr(command, "end_dead_runs", lambda: None)
    return made


def ledger() -> list[dict[str, Any]]:
    path = Path("reports", NAME)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_true_mitigation_is_supported_with_its_counts_and_filed(launched: Launched, capsys: Any) -> None:
    launched.ends = {"=false": [HANG], "=true": [PASS]}
    assert run_command_line([*CLAIM, "--text", "find_unused_parameters fixes it"]) == 0
    assert launched.asked == [f"ddp_onestep@{KEY}=false", f"ddp_onestep@{KEY}=true"] * 5
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "CLAIM  ddp_onestep   find_unused_parameters fixes it"
    assert "  3  without it  HANG    5.0 s   2/2 against 0/1   lock_cycle · train.py:4" in out
    assert "  4  with it     PASS    5.0 s   2/2 against 0/2   at most 98 more pairs, 16 min 20 s" in out
    assert "SUPPORTED  it fails less often: 5 of 5 without it and 0 of 5 with it   (95 % sure)" in out
    assert "fixed       yes: 5 passes; a failure as frequent as without it (5 of 5) would show within 2 passes" in out
    (line,) = ledger()
    assert (line["kind"], line["result"], line["fixed"], line["computes"]) == (
        "claim", "supported", "yes", "not known",
    )  # fmt: skip
    assert line["order_seed"] == WITHOUT_FIRST
    assert (line["commit"], line["dirty"]) == ("1a2b3c4d5e6f", True)
    assert [(side["what"], side["failed"], side["of"]) for side in line["sides"]] == [
        (f"{KEY}=false", 5, 5), (f"{KEY}=true", 0, 5),
    ]  # fmt: skip
    run_dir = Path("reports", line["runs"][0])
    assert run_dir.resolve() == Path("reports/latest").resolve()
    assert {"SUMMARY.md", "report.html", "report.json"} <= {path.name for path in run_dir.iterdir()}
    assert len(json.loads((run_dir / "report.json").read_text())["outcomes"]) == 10


def test_fewer_failures_and_none_are_two_things_and_both_are_told_with_their_counts(
    launched: Launched, capsys: Any
) -> None:
    launched.ends = {"=false": [HANG, HANG, PASS] * 20, "=true": [HANG, *[PASS] * 60]}
    assert run_command_line([*CLAIM]) == 0
    out = " ".join(capsys.readouterr().out.split())
    (line,) = ledger()
    (first, second) = line["sides"]
    assert (second["failed"], line["fixed"]) == (1, "no")
    counts = f"{first['failed']} of {first['of']} without it and 1 of {second['of']} with it"
    assert f"SUPPORTED it fails less often: {counts} (95 % sure)" in out
    assert f"with it failed 1 of {second['of']} (0 % to " in out
    assert f"fixed no: it still fails with it (1 of {second['of']} runs)" in out


def test_sides_in_the_other_order_are_noticed_before_and_after(launched: Launched, capsys: Any) -> None:
    """The scenario has DDP itself, so "with it" is the scenario as it is."""
    launched.ends = {"=ddp": [HANG]}
    assert run_command_line(["claim", "ddp_onestep", "parallel.wrapper=none,ddp"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert 'parallel.wrapper=ddp is what the scenario has, so "with it" is the program unchanged' in out
    assert "order parallel.wrapper=ddp counts as the change here; if parallel.wrapper=none is the change, give" in out
    launched.ends = {"=ddp": [HANG], "=none": [PASS]}
    assert run_command_line(["claim", "ddp_onestep", "parallel.wrapper=ddp,none"]) == 0
    assert "in the other order" not in " ".join(capsys.readouterr().out.split())


def test_the_times_of_both_sides_are_told_where_only_the_deadline_made_the_difference(
    launched: Launched, capsys: Any
) -> None:
    launched.ends, launched.cause = {"=false": [FAIL]}, "slow"
    assert run_command_line([*CLAIM]) == 125
    assert (
        "UNDECIDED the deadline, not a hang or a crash, made the difference: it was reached by 5 of 5 runs without it"
        " (at least 5.0 s) and 0 of 5 runs with it (5.0 s)" in " ".join(capsys.readouterr().out.split())
    )


def test_a_side_that_cannot_be_launched_is_listed_as_not_tested_and_no_undecided_row_is_sure(
    launched: Launched, capsys: Any
) -> None:
    assert run_command_line(["claim", "ddp_onestep", "needs.backend=nccl,gloo", "--text", "NCCL is the cause"]) == 2
    launched.ends = {"=false": [ERROR]}
    assert run_command_line([*CLAIM, "--text", "again"]) == 125
    capsys.readouterr()
    assert run_command_line(["claim", "--list"]) == 0
    untested, undecided = (row.split(" | ") for row in capsys.readouterr().out.splitlines()[2:])
    assert untested[1] == "NCCL is the cause"
    assert untested[2].startswith("not tested here: NCCL needs a GPU")
    assert (undecided[2], undecided[7]) == ("undecided", "")
    assert ledger()[0]["result"] == "not comparable"


@pytest.mark.parametrize(
    ("first", "second", "code", "said"),
    [
        (
            [HANG],
            [FAIL],
            1,
            "REFUTED  it does not prevent half of the failures: 6 of 6 without it and 6 of 6 with it",
        ),
        ([PASS], [HANG], 1, "REFUTED  "),
        ([PASS], [PASS], 125, "UNDECIDED  nothing failed in 3 runs of each side"),
        ([HANG], [ERROR], 125, "UNDECIDED  3 runs with it could not be judged"),
    ],
)
def test_each_answer_has_its_exit_code(
    launched: Launched, capsys: Any, first: list[Status], second: list[Status], code: int, said: str
) -> None:
    launched.ends = {"=false": first, "=true": second}
    assert run_command_line([*CLAIM]) == code
    assert said in capsys.readouterr().out
    assert len(ledger()) == 1


def test_a_side_that_passes_is_asked_longer_where_somebody_insists_or_has_seen_it_fail(
    launched: Launched, capsys: Any
) -> None:
    assert run_command_line([*CLAIM, "--confidence", "0.95"]) == 125
    assert "nothing failed in 14 runs of each side" in capsys.readouterr().out
    launched.ends = {"=false": [HANG], "=true": [PASS]}
    assert run_command_line([*CLAIM, "--pairs", "2"]) == 125
    assert "UNDECIDED  2 pairs do not decide it: 2 of 2 without it and 0 of 2 with it" in capsys.readouterr().out
    launched.ends = {}
    assert run_command_line([*CLAIM]) == 125
    assert "nothing failed in 14 runs of each side" in capsys.readouterr().out


def test_a_budget_ends_it_with_what_was_counted(launched: Launched, capsys: Any) -> None:
    launched.ends = {"=false": [HANG]}
    assert run_command_line([*CLAIM, "--budget", "12s"]) == 125
    assert (
        "UNDECIDED  the budget of 12.0 s is used up: 2 of 2 runs failed without the change, 0 of 1 with it"
        in capsys.readouterr().out
    )
    assert (ledger()[0]["attempts"], ledger()[0]["seconds"]) == (3, 15.0)


def test_two_keys_are_refused_and_both_are_named(launched: Launched, capsys: Any) -> None:
    assert run_command_line([*CLAIM, "gc.layers=none,all"]) == 2
    said = capsys.readouterr().err
    assert KEY in said
    assert "gc.layers" in said
    assert launched.asked == []
    assert not Path("reports").exists()


def write_training(norms: dict[str, float]) -> Callable[[RunSpec, AttemptDir], None]:
    def leaves(spec: RunSpec, attempt: AttemptDir) -> None:
        norm = next(norm for word, norm in norms.items() if word in spec.scenario)
        (attempt.path / "training.csv").write_text(f"step,loss,grad_norm\n1,5.5,{norm}\n")

    return leaves


def test_a_mitigation_that_changes_the_gradients_is_refuted_though_it_fails_less_often(
    launched: Launched, capsys: Any
) -> None:
    launched.ends = {"=false": [HANG]}
    launched.leaves = write_training({"=false": 2.0, "=true": 1.0})
    assert run_command_line([*CLAIM]) == 1
    out = capsys.readouterr().out
    assert "REFUTED  it changes what is computed: grad_norm of step 1 is 2 without it and 1 with it" in out
    assert "sure)" not in out
    assert ledger()[0]["computes"].startswith("grad_norm of step 1 is 2 without it")


def test_of_a_key_that_may_change_what_is_computed_the_difference_is_told_alone(
    launched: Launched, capsys: Any
) -> None:
    launched.ends = {"=nsa": [HANG]}
    launched.leaves = write_training({"=nsa": 2.0, "=vanilla": 1.0})
    assert run_command_line(["claim", "ddp_onestep", "model.attention=nsa,vanilla"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "computes different numbers: grad_norm of step 1 is 2 without it and 1 with it" in out
    assert "this may be intended and does not refute the claim" in out


def test_a_program_that_is_edited_meanwhile_is_two_programs(launched: Launched, capsys: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('one')\n")

    def edit(_: RunSpec, attempt: AttemptDir) -> None:
        if attempt.path.name.endswith("~2"):
            script.write_text("print('another one')\n")

    launched.ends, launched.leaves = {"MODE=a": [HANG]}, edit
    assert run_command_line(["claim", "train.py", "run.env.MODE=a,b"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "NOT COMPARABLE train.py has changed during the test" in said.replace("has changed changed", "has changed")
    assert ledger()[0]["result"] == "not comparable"


def test_ctrl_c_leaves_what_was_counted_and_says_what_the_same_command_does(launched: Launched, capsys: Any) -> None:
    launched.ends = {"=false": [HANG]}

    def interrupt(_: RunSpec, attempt: AttemptDir) -> None:
        if attempt.path.name.endswith("=true~2"):
            os.kill(os.getpid(), signal.SIGINT)

    launched.leaves = interrupt
    assert run_command_line([*CLAIM]) == 130
    said = capsys.readouterr().out
    assert (
        "UNDECIDED interrupted; 2 of 2 runs failed without the change, 0 of 1 with it; the same command continues"
        in " ".join(said.split())
    )
    (line,) = ledger()
    assert [(side["failed"], side["of"], side["rate"]) for side in line["sides"]] == [(2, 2, 1.0), (0, 1, 0.0)]
    assert json.loads((Path("reports", line["runs"][0]) / "run.json").read_text())["interrupted"] is True


class Killed(BaseException):
    """In the place of SIGKILL: only files remain."""


def kill_in(launched: Launched, number: int) -> None:
    """Make the claim be killed in its run `number`."""

    def leaves(_: RunSpec, __: AttemptDir) -> None:
        if len(launched.asked) == number - 1:
            raise Killed

    launched.leaves = leaves


@pytest.mark.parametrize("number", [1, 2, 4, 7])
@pytest.mark.parametrize("between", [False, True], ids=["in the run", "after the run"])
def test_a_killed_claim_goes_on_where_it_was_killed(
    launched: Launched, capsys: Any, monkeypatch: pytest.MonkeyPatch, number: int, between: bool
) -> None:
    launched.ends = {"=false": [HANG]}
    assert run_command_line([*CLAIM, "--out", "whole"]) == 0
    whole, asked = json.loads(Path("whole", NAME).read_text()), launched.asked

    show = experiment.Experiment.show

    def killed_show(*arguments: Any) -> None:
        if len(launched.asked) == number:
            raise Killed
        show(*arguments)

    launched.asked = []
    with monkeypatch.context() as patched:
        if between:
            patched.setattr(experiment.Experiment, "show", killed_show)
        else:
            kill_in(launched, number)
        with pytest.raises(Killed):
            run_command_line([*CLAIM])
    launched.leaves = lambda *_: None
    monkeypatch.setattr(claim, "draw_order_seed", lambda: 7)  # the new seed of the second command is not used
    capsys.readouterr()
    assert run_command_line([*CLAIM]) == 0
    stored = number - 1 + between
    assert launched.asked == asked
    runs = f"{stored} run{'' if stored == 1 else 's'} already finished"
    assert runs in " ".join(capsys.readouterr().out.split())
    (line,) = ledger()
    same = ("result", "why", "sides", "attempts", "order_seed", "seconds")
    assert {key: line[key] for key in same} == {key: whole[key] for key in same}
    assert len(json.loads(Path("reports", "latest", "report.json").read_text())["outcomes"]) == line["attempts"]


def test_a_claim_that_was_killed_before_its_answer_was_filed_is_not_run_again(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched.ends = {"=false": [HANG]}

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(experiment.Experiment, "finish", killed)
        with pytest.raises(Killed):
            run_command_line([*CLAIM])
    asked, launched.asked = launched.asked, []
    assert run_command_line([*CLAIM]) == 0
    assert launched.asked == []
    assert ledger()[0]["attempts"] == len(asked)


def test_an_interrupted_claim_goes_on_with_a_larger_budget_and_ends_once(launched: Launched, capsys: Any) -> None:
    launched.ends = {"=false": [HANG]}
    assert run_command_line([*CLAIM, "--budget", "20s"]) == 125
    assert run_command_line([*CLAIM, "--budget", "1h"]) == 0
    assert [(line["result"], line["attempts"]) for line in ledger()] == [("undecided", 4), ("supported", 10)]
    assert len(launched.asked) == 10
    assert run_command_line([*CLAIM]) == 0
    assert len(launched.asked) == 20
    assert capsys.readouterr().out.count("already finished") == 1


def test_a_killed_claim_about_a_program_that_was_edited_since_begins_anew(
    launched: Launched, capsys: Any, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('one')\n")
    kill_in(launched, 3)
    with pytest.raises(Killed):
        run_command_line(["claim", "train.py", "run.env.MODE=a,b"])
    launched.leaves = lambda *_: None
    script.write_text("print('another one')\n")
    assert run_command_line(["claim", "train.py", "run.env.MODE=a,b"]) == 125
    said = " ".join(capsys.readouterr().out.split())
    assert "train.py has changed since the claim in" in said
    assert "a new claim starts" in said
    assert ledger()[0]["attempts"] == 6


def test_a_claim_about_two_commits_leaves_no_worktree_and_goes_on(launched: Launched, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    for text in ("print('one')\n", "print('two')\n"):
        Path("train.py").write_text(text)
        git("add", "train.py")
        git("commit", "-qm", "a commit")
    seen = []

    def leaves(spec: RunSpec, _: AttemptDir) -> None:
        seen.append((Path(spec.cwd or "") / "train.py").read_text())
        if len(seen) == 4:
            raise Killed

    launched.leaves = leaves
    words = ["claim", "train.py", "--ranks", "1", "--commits", "HEAD~1..HEAD"]
    with pytest.raises(Killed):
        run_command_line(words)
    assert len(git("worktree", "list").splitlines()) == 1
    assert run_command_line(words) == 125
    assert (len(launched.asked), sorted(seen)) == (6, ["print('one')\n"] * 3 + ["print('two')\n"] * 4)
    assert len(git("worktree", "list").splitlines()) == 1
    assert ledger()[0]["attempts"] == 6


def test_a_dry_run_shows_both_sides_and_what_it_takes_and_writes_nothing(launched: Launched, capsys: Any) -> None:
    assert run_command_line([*CLAIM, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "--no-find-unused-parameters" in out
    assert "5 pairs if every run fails without it and none with it, at most 100" in " ".join(out.split())
    assert (launched.asked, Path("reports").exists()) == ([], False)
    assert run_command_line([*CLAIM, "--dry-run", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["scenario"] for event in events] == [f"ddp_onestep@{KEY}=false", f"ddp_onestep@{KEY}=true"]
    launched.ends = {"=false": [HANG]}
    run_command_line([*CLAIM])
    run_command_line([*CLAIM, "--dry-run"])
    assert "50.0 s to 16 min 40 s, estimated from stored runs" in " ".join(capsys.readouterr().out.split())


def test_programs_read_the_claim_as_the_last_event_and_people_read_stderr(launched: Launched, capsys: Any) -> None:
    launched.ends = {"=false": [HANG]}
    assert run_command_line([*CLAIM, "--json"]) == 0
    told = capsys.readouterr()
    events = [json.loads(line) for line in told.out.splitlines()]
    last = events[-1]
    assert (last["event"], last["claim"]["result"], last["exit_code"]) == ("done", "supported", 0)
    assert [event["event"] for event in events].count("outcome") == 10
    assert "SUPPORTED" in told.err
    assert json.loads(Path("reports/latest/events.jsonl").read_text().splitlines()[-1]) == last
    jsonschema.validate(last, json_schema(Document.EVENTS))


def test_the_ledger_is_a_table_to_paste(launched: Launched, capsys: Any) -> None:
    assert run_command_line(["claim", "--list"]) == 0
    assert capsys.readouterr().out.count("\n") == 2
    launched.ends = {"=false": [HANG]}
    run_command_line([*CLAIM, "--text", "it | helps", "--no-redact"])
    capsys.readouterr()
    with Path("reports", NAME).open("a") as torn:
        torn.write('{"schema":1,"kind":"cl')
    run_command_line([*CLAIM, "--text", "again"])
    capsys.readouterr()
    assert run_command_line(["claim", "--list"]) == 0
    told = capsys.readouterr()
    rows = told.out.splitlines()[2:]
    assert [row.split(" | ")[1:5] for row in rows] == [
        ["it \\| helps", "supported", "5 of 5", "0 of 5"], ["again", "supported", "5 of 5", "0 of 5"],
    ]  # fmt: skip
    assert "1 line of reports/claims.jsonl could not be read" in told.err
    assert run_command_line(["claim", "--list", "--json"]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == ["it | helps", "again"]


def test_a_secret_of_the_command_is_not_in_the_ledger(launched: Launched) -> None:
    launched.ends = {"=1": [HANG]}
    secret = "hf_" + "a1B2c3D4" * 4
    run_command_line(["claim", "ddp_onestep", "run.env.MODE=1,2", f"run.env.HF_TOKEN={secret}", "--text", secret])
    assert len(ledger()) == 1
    assert secret not in Path("reports", NAME).read_text()


def test_lines_of_several_writers_stay_whole(launched: Launched) -> None:
    launched.ends = {"=false": [HANG]}
    run_command_line([*CLAIM])
    (line,) = read_ledger(Path("reports")).lines
    redaction = create_run(Path("other")).redaction
    writers = [threading.Thread(target=store.add_line, args=(Path("reports"), line, redaction)) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert read_ledger(Path("reports")).lines == (line,) * 9


def test_a_line_waits_for_whoever_writes_one(launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    launched.ends = {"=false": [HANG]}
    monkeypatch.setattr(store, "_LOCK_LIMIT_S", 0.05)
    Path("reports").mkdir()
    with FileLock("reports/.claims.lock"):
        assert run_command_line([*CLAIM]) == 0
    told = capsys.readouterr()
    assert (
        "the ledger of claims could not be written: reports/claims.jsonl: another nsa-harness has been writing"
        in told.err
    )
    assert "SUPPORTED" in told.out
    assert not Path("reports", NAME).exists()


# After an edit.


@pytest.fixture
def stored(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes a stored run of one scenario whose attempts ended so."""

    def make(*ends: Status, name: str = "mine", place: Place | None = None, expected: bool = False) -> str:
        made = create_run(Path("reports"))
        Path("train.py").write_text("print('trained')\n")
        launched.ends = {name: [*ends]}
        outcomes = []
        question = Invocation(
            arguments=(), script=Script(file="train.py", ranks=2, args=()), working_dir=Path.cwd(), environ={}
        )
        (spec,) = plan_launches(question, FACTS).specs
        assert isinstance(spec, RunSpec)
        launched.place = place or Place(file="train.py", line=4)
        for number, _ in enumerate(ends, start=1):
            launched.ends[name] = [ends[number - 1]]
            attempt = made.attempt(name, number)
            outcome = launched(replace(spec, scenario=name), attempt, number=number)
            outcomes.append(replace(outcome, expected=expected))
        monkeypatch.setattr(verify, "judge_attempts", lambda _: outcomes)
        made.directory.write(made.record, "{}")
        launched.asked.clear()
        return str(made.path)

    return make


def test_five_passes_are_enough_where_it_failed_the_one_time(
    launched: Launched, stored: Callable[..., str], capsys: Any
) -> None:
    run_dir = stored(HANG)
    launched.ends = {"mine": [PASS]}
    assert run_command_line(["run", "--verify", run_dir]) == 0
    out = capsys.readouterr().out
    assert out.index("5 passes without a failure to count as fixed") < out.index("  1  PASS")
    assert "FIXED  it passed 5 of 5 times" in out
    assert launched.asked == ["mine"] * 5
    (line,) = ledger()
    assert (line["kind"], line["result"], line["fixed"]) == ("verify", "fixed", "yes")
    assert [(side["failed"], side["of"]) for side in line["sides"]] == [(1, 1), (0, 5)]
    assert line["runs"][0] == Path(run_dir).name
    assert line["sides"][0]["spec_hash"] != line["sides"][1]["spec_hash"]


def test_a_hang_of_one_in_five_takes_nineteen_passes(
    launched: Launched, stored: Callable[..., str], capsys: Any
) -> None:
    run_dir = stored(PASS, PASS, HANG, PASS, PASS)
    launched.ends = {"mine": [PASS]}
    assert run_command_line(["run", "--verify", run_dir]) == 0
    assert len(launched.asked) == 19
    out = " ".join(capsys.readouterr().out.split())
    assert "19 passes without a failure to count as fixed: a failure as frequent as before (1 of 5) would then" in out
    launched.ends = {"mine": [PASS, PASS, HANG]}
    launched.asked.clear()
    assert run_command_line(["run", "--verify", run_dir]) == 1
    assert len(launched.asked) == 3
    assert "NOT FIXED run 3 failed in the same way: HANG · lock_cycle · train.py:4" in " ".join(
        capsys.readouterr().out.split()
    )
    assert [line["result"] for line in ledger()] == ["fixed", "not fixed"]


@pytest.mark.parametrize(
    ("cause", "line", "said"),
    [("lock_cycle", 9, "NOT FIXED"), ("rank_died", 4, "NOT FIXED"), ("rank_died", 9, "FAILS OTHERWISE")],
)
def test_alike_is_the_cause_or_the_line(
    launched: Launched, stored: Callable[..., str], capsys: Any, cause: str, line: int, said: str
) -> None:
    run_dir = stored(HANG)
    launched.ends, launched.cause, launched.place = {"mine": [HANG]}, cause, Place(file="train.py", line=line)
    assert run_command_line(["run", "--verify", run_dir]) == 1
    assert said in capsys.readouterr().out


def test_more_passes_are_asked_for_by_repeat_and_a_dry_run_says_how_many(
    launched: Launched, stored: Callable[..., str], capsys: Any
) -> None:
    run_dir = stored(FAIL)
    assert run_command_line(["run", "--verify", run_dir, "--repeat", "7", "--dry-run"]) == 0
    assert "7 passes without a failure to count as fixed" in capsys.readouterr().out
    assert launched.asked == []
    launched.ends = {"mine": [PASS]}
    assert run_command_line(["run", "--verify", run_dir, "--repeat", "7"]) == 0
    assert len(launched.asked) == 7


def test_what_did_not_fail_is_not_verified_and_no_other_selection_goes_with_it(
    launched: Launched, stored: Callable[..., str], capsys: Any
) -> None:
    run_dir = stored(PASS)
    assert run_command_line(["run", "--verify", run_dir]) == 2
    assert "nothing failed in this run" in capsys.readouterr().err
    assert run_command_line(["run", "--verify", run_dir, "ddp_onestep"]) == 2
    assert run_command_line(["run", "--verify", run_dir, "--lf"]) == 2
    assert launched.asked == []
