"""A search that is cut short in any way goes on exactly: launches are made up here, all else is as it runs."""

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

from nsa_harness.commands import bisect, session
from nsa_harness.commands.bisect import run_bisection
from nsa_harness.core.experiment.trial import SoughtFailure
from nsa_harness.core.outcome.outcome import unjudged_outcome
from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts, Outcome, Status
from nsa_harness.supervisor.experiments import cache_key
from nsa_harness.supervisor.experiments.cache_key import Interpreter
from nsa_harness.supervisor.experiments.launches import BisectRequest, parse_templates
from nsa_harness.supervisor.experiments.subjects import SubjectOptions, make_subject
from nsa_harness.supervisor.launch.planning import Invocation, Script
from nsa_harness.supervisor.storage.rundir import AttemptDir, RunDir, RunOptions

FACTS = MachineFacts(host="h", cpus=2, gpus=(), torch="2.13.0")
CULPRITS = {2, 6}
Hook = Callable[[int], None]


class Killed(BaseException):
    """In the place of SIGKILL: nothing but files outlives it."""


class Machine:
    """Launches nothing: what is asked of it fails with both culprits, and before each launch anything may happen."""

    def __init__(self) -> None:
        self.launched: list[frozenset[int]] = []
        self.before: Hook = lambda _: None
        self._lock = threading.Lock()

    def __call__(self, spec: RunSpec, attempt: AttemptDir, **_: Any) -> Outcome:
        layers = frozenset(int(one) for one in spec.program[-1].partition("=")[2].split(",") if one)
        with self._lock:
            self.launched.append(layers)
            number = len(self.launched)
        self.before(number)
        attempt.path.mkdir()
        outcome = unjudged_outcome(spec, attempt=1, directory=attempt.path.name, error="")
        status = Status.FAIL if layers >= CULPRITS else Status.PASS
        return replace(outcome, verdict=replace(outcome.verdict, status=status, cause="exception", summary="it fails"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "run_one", made)
    monkeypatch.setattr(bisect, "machine_facts", lambda: FACTS)
    monkeypatch.setattr(cache_key, "query_interpreter", lambda *_: Interpreter(version="3.11.7"))
    monkeypatch.setattr(cache_key, "_DIGEST_ROUNDS", 1)
    (tmp_path / "train.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("")
    return made


def search(parent: str = "reports", **changes: Any) -> tuple[int, dict[str, Any], Path]:
    """As typed once: its exit code, its answer and its folder."""
    question = Invocation(
        arguments=(), working_dir=Path.cwd(), environ={}, script=Script(file="train.py", ranks=2, args=())
    )
    question, subject = make_subject(SubjectOptions(gc_range="0:8"), question, templated=True, facts=FACTS)
    request = BisectRequest(
        question=question, subject=subject, templates=parse_templates(["--layers={layers}"], []), base_args=(),
        sought=SoughtFailure(), confidence=0.95, repeat=1, jobs=1, budget_s=None, fork=False,
        options=RunOptions(out=Path(parent), command="nsa-harness bisect train.py --gc-range=0:8"),
    )  # fmt: skip
    code = run_bisection(replace(request, **changes))
    run = Path(parent, "latest").resolve()
    return code, json.loads((run / "bisect.json").read_text()), run


def killed_at(machine: Machine, number: int) -> None:
    def kill(launch: int) -> None:
        if launch == number:
            raise Killed

    machine.before = kill
    with pytest.raises(Killed):
        search()
    machine.before = lambda _: None


def folders() -> list[str]:
    return sorted(path.name for path in Path("reports").glob("2*"))


@pytest.mark.parametrize("number", [7, 14])
def test_killed_in_a_launch_it_goes_on_and_repeats_no_finished_probe(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The order of the proofs is drawn from the name of the run, which stays the same when the search goes on."""
    monkeypatch.setattr(RunDir, "run_id", "20260101T000000-0000")
    search("whole")
    whole = list(machine.launched)
    machine.launched.clear()
    killed_at(machine, number)
    code, said, _ = search()
    assert (code, said["answer"]["items"], len(folders())) == (0, [2, 6], 1)
    assert machine.launched == [*whole[: number - 1], *whole[number - 1 : number], *whole[number - 1 :]]
    assert [one["n"] for one in said["probes"]] == list(range(1, len(whole) + 1))


def test_ctrl_c_tells_what_is_known_and_the_same_command_goes_on(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(launch: int) -> None:
        if launch == 7:
            os.kill(os.getpid(), signal.SIGINT)

    machine.before = interrupt
    code, said, first = search()
    assert (code, said["answer"]["kind"], said["detail"]["interrupted"]) == (130, "undecided", True)
    assert "layer 6 is needed" in capsys.readouterr().out
    machine.before = lambda _: None
    code, said, second = search()
    assert (code, said["answer"]["items"], second) == (0, [2, 6], first)
    assert machine.launched.count(machine.launched[6]) == 2  # the one that was interrupted
    assert f"continues reports/{first.name}: 6 probes already finished" in " ".join(capsys.readouterr().out.split())


def test_a_budget_that_is_spent_tells_what_is_known_and_a_larger_one_goes_on(machine: Machine) -> None:
    code, said, first = search(budget_s=0.0)
    assert (code, said["answer"]["kind"], machine.launched) == (125, "undecided", [])
    code, said, second = search(budget_s=3600.0)
    assert (code, said["answer"]["items"], second) == (0, [2, 6], first)


def test_what_is_edited_between_two_searches_begins_a_new_one_and_is_named(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_at(machine, 4)
    (first,) = folders()
    Path("helper.py").write_text("x = 1\n")
    launched = len(machine.launched)
    code, said, _ = search()
    assert (code, said["answer"]["items"], len(folders())) == (0, [2, 6], 2)
    assert len(machine.launched) - launched == len(said["probes"])
    note = f"helper.py has changed since the search in reports/{first}; a new search starts"
    assert note in said["detail"]["notes"]
    assert note in " ".join(capsys.readouterr().out.split())


def test_what_the_program_writes_is_no_reason_to_begin_anew(machine: Machine) -> None:
    Path("train.py").write_text("import helper\nopen('loss.csv', 'a').write('1')\n")
    Path("loss.csv").write_text("")

    def train(launch: int) -> None:
        with Path("loss.csv").open("a") as file:
            file.write("1\n")
        if launch == 4:
            raise Killed

    machine.before = train
    with pytest.raises(Killed):
        search()
    code, said, _ = search()
    assert (code, len(folders()), said["answer"]["items"]) == (0, 1, [2, 6])


def test_a_program_that_is_edited_while_it_is_searched_is_told(machine: Machine) -> None:
    def edit(launch: int) -> None:
        if launch == 4:
            Path("helper.py").write_text("x = 1\n")

    machine.before = edit
    _, said, _ = search()
    assert (
        "helper.py has changed during the search: the probes did not all run one program" in (said["detail"]["notes"])
    )


def test_two_searches_in_one_directory_have_a_folder_each(machine: Machine) -> None:
    second: dict[str, Any] = {}
    first: list[str] = []

    def begin_another(launch: int) -> None:
        if launch == 3:
            machine.before = lambda _: None
            first.extend(folders())
            code, said, _ = search()
            second.update(said, code=code)

    machine.before = begin_another
    code, _, _ = search()
    assert (code, second["code"], len(folders())) == (0, 0, 2)
    assert [second["detail"]["run_id"]] == [name for name in folders() if name not in first]
    answers = [json.loads(Path("reports", name, "bisect.json").read_text())["answer"]["items"] for name in folders()]
    assert answers == [[2, 6], [2, 6]]
    beside = f"another search like this is still running in reports/{first[0]}; this is a separate one"
    assert beside in second["detail"]["notes"]
