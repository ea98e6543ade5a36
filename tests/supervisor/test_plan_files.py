"""Plan files on disk: what a command line means by one, whose gates stand, and by which a stored run is judged."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_harness.commands.run import request_to_resume, stored_plan_file
from nsa_harness.commands.scheduler import RunRequest
from nsa_harness.commands.session import report_of
from nsa_harness.core.comparison.plan_file import PlanText, read_plan, read_stored_plan
from nsa_harness.core.report import MachineFacts, Report, RuleState, Status
from nsa_harness.errors import ScenarioError, UsageError
from nsa_harness.supervisor.launch import planning
from nsa_harness.supervisor.launch.planning import Invocation, LaunchPlan, all_scenarios, plan_launches
from nsa_harness.supervisor.launch.scenario_files import shipped_plan
from nsa_harness.supervisor.storage.record import RunRecord, read_record, write_record
from nsa_harness.supervisor.storage.rundir import RunDir, RunOptions, create_run

sys.path.append(str(Path(__file__).parents[1] / "core"))
from runs import run

MACHINE = MachineFacts(host="node7", cpus=2, gpus=(), torch="2.13.0+cpu")
SMOKE = "gates:\n  smoke:\n    if: {fails: smoke}\n    then: mend it\n    because: all else builds on it\n"
PLAN = f"tags: [mine]\nscenarios: [smoke]\n{SMOKE}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three scenarios of somebody else's program; of those that ship, which take a second, none."""
    monkeypatch.setattr(planning, "shipped_root", lambda: tmp_path / "none")
    (tmp_path / "train.py").write_text("")
    for name, tags, priority in (("smoke", [], 0), ("first", ["mine", "plan"], 5), ("second", ["mine"], 0)):
        write(
            tmp_path / "scenarios" / f"{name}.yaml",
            f"tags: [{', '.join(tags)}]\npriority: {priority}\nrun: {{program: train.py, args: [{name}]}}\n",
        )
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def meant(here: Path, *words: str, tags: tuple[str, ...] = ()) -> LaunchPlan:
    return plan_launches(
        Invocation(arguments=words, tags=tags, working_dir=here, environ={}, python=sys.executable), MACHINE
    )


def names(plan: LaunchPlan) -> list[str]:
    return [spec.scenario for spec in plan.specs]


def test_a_plan_file_runs_what_it_names_by_priority_and_its_gates_stand(here: Path) -> None:
    write(here / "scenarios" / "plans" / "mine.yaml", PLAN)
    plan = meant(here, "scenarios/plans/mine.yaml", "run.ranks=1")
    assert names(plan) == ["first", "second", "smoke"]
    assert plan.plan_text == PlanText(file="scenarios/plans/mine.yaml", text=PLAN)
    assert {spec.ranks for spec in plan.specs if not hasattr(spec, "reason")} == {1}


def test_a_plan_file_may_lie_anywhere_and_other_words_stand_beside_it(here: Path) -> None:
    write(here / "x.yaml", f"scenarios: [second]\n{SMOKE.replace('smoke', 'second')}")
    assert names(meant(here, "first", "x.yaml")) == ["first", "second"]


def test_the_plan_that_names_a_tag_stands_for_it_and_the_users_before_ours(here: Path) -> None:
    write(here / "scenarios" / "plans" / "mine.yaml", PLAN)
    assert meant(here, tags=("mine",)).plan_text == PlanText(file="scenarios/plans/mine.yaml", text=PLAN)
    assert names(meant(here, tags=("mine",))) == ["first", "second"]
    assert meant(here, "smoke").plan_text == shipped_plan()
    assert meant(here, tags=("plan",)).plan_text == shipped_plan()
    theirs = PLAN.replace("[mine]", "[plan]").replace("[smoke]", "[smoke, first]")
    write(here / "scenarios" / "plans" / "other.yaml", theirs)
    plan = meant(here, tags=("plan",))
    assert plan.plan_text is not None
    assert plan.plan_text.text == theirs
    ignored = "other plan files with its tags are ignored: plans/plan.yaml"
    assert f"the plan file of this run is scenarios/plans/other.yaml; {ignored}" in plan.notes


def test_plans_are_no_scenarios(here: Path) -> None:
    before = len(all_scenarios(here)[0])
    write(here / "scenarios" / "plans" / "mine.yaml", PLAN)
    assert len(all_scenarios(here)[0]) == before


def test_every_mistake_of_every_plan_is_told_before_anything_runs(here: Path) -> None:
    write(here / "scenarios" / "plans" / "a.yaml", PLAN.replace("fails: smoke", "fails: smokee"))
    write(here / "scenarios" / "plans" / "b.yaml", PLAN.replace("then", "than"))
    with pytest.raises(ScenarioError) as error:
        meant(here, tags=("mine",))
    assert error.value.mistakes == (
        'scenarios/plans/a.yaml:5:10: gates.smoke.if.fails: no scenario named "smokee"; did you mean "smoke"?',
        "scenarios/plans/b.yaml:4:3: gates.smoke.then: is required",
        'scenarios/plans/b.yaml:6:5: gates.smoke.than: unknown key; did you mean "then"?',
    )
    with pytest.raises(ScenarioError, match="smokee"):
        meant(here, "scenarios/plans/a.yaml")
    write(here / "scenarios" / "plans" / "c.yaml", PLAN)
    with pytest.raises(UsageError, match="a run has one plan file"):
        meant(here, "scenarios/plans/c.yaml", "scenarios/plans/a.yaml")


def test_a_link_that_leads_out_of_the_scenarios_is_no_plan_of_them(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = write(tmp_path_factory.mktemp("outside") / "secret.yaml", "password: hunter2\n")
    (here / "scenarios" / "plans").mkdir()
    (here / "scenarios" / "plans" / "mine.yaml").symlink_to(outside)
    with pytest.raises(ScenarioError) as error:
        meant(here, tags=("mine",))
    assert "hunter2" not in str(error.value)
    assert "is a link that leads out of scenarios" in str(error.value)


def test_the_plan_that_ships_names_scenarios_keys_and_causes_that_there_are(tmp_path: Path) -> None:
    assert read_plan(shipped_plan(), all_scenarios(tmp_path)[0]).mistakes == ()


def stored(tmp_path: Path, agreed: PlanText | None) -> tuple[RunDir, RunRecord]:
    folder = create_run(tmp_path / "reports")
    record = RunRecord(command="c", harness="0", machine=MACHINE, controller=0, plan=(), plan_text=agreed)
    write_record(folder, record)
    return folder, read_record(folder)


def judged(folder: RunDir, record: RunRecord) -> Report:
    return report_of(folder, record, [run("smoke", Status.FAIL), run("first")])


def test_a_stored_run_is_judged_by_the_gates_that_stood_when_it_was_started(tmp_path: Path) -> None:
    folder, record = stored(tmp_path, PlanText(file="scenarios/plans/mine.yaml", text=PLAN))
    (gate,) = judged(folder, record).gates  # no file of that name is there any more
    assert (gate.name, gate.state, gate.why, gate.leads) == ("smoke", RuleState.MATCHED, "smoke FAIL", True)
    assert resumed_agreed(folder) == record.plan_text
    assert stored_plan_file(folder.path, None) == record.plan_text


def resumed_agreed(folder: RunDir) -> PlanText | None:
    spec = plan_launches(Invocation(arguments=("ddp_onestep",), working_dir=folder.path, environ={}), MACHINE).specs
    write_record(folder, replace(read_record(folder), plan=spec))
    request = RunRequest(specs=(), options=RunOptions(command="c"))
    return request_to_resume(folder.path, request).plan_file


def test_a_run_that_stored_no_gates_is_judged_by_those_that_ship(tmp_path: Path) -> None:
    folder, record = stored(tmp_path, None)
    assert [one.name for one in judged(folder, record).gates] == [*read_stored_plan(shipped_plan()).plan.gates]


def test_gates_that_cannot_be_read_any_more_are_said_and_the_runs_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, record = stored(tmp_path, PlanText(file="mine.yaml", text=f"{PLAN}later: 1\n"))
    report = judged(folder, record)
    assert (report.gates, len(report.outcomes)) == ((), 2)
    told = "mine.yaml:8:1: later: unknown key"
    assert told in capsys.readouterr().err
