"""From the options of `bisect` to what is varied, and from a choice of it to a launch."""

from __future__ import annotations

import gzip
import json
import shlex
import signal
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from nsa_harness.commands import bisect
from nsa_harness.commands.bisect_report import show_plan
from nsa_harness.commands.run import rejudge
from nsa_harness.core.experiment.trial import Signature, SoughtFailure, parse_outcome
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.search.effort import possible_cases, total_probes, worst_case_stages
from nsa_harness.core.search.question import ProbeResult, Purpose, QuestionKind
from nsa_harness.core.search.report import ProbeReport
from nsa_harness.core.search.subject import SubjectForm
from nsa_harness.errors import StoredRunError, UsageError
from nsa_harness.supervisor.experiments.intermediate_configs import Worktrees, commits_between
from nsa_harness.supervisor.experiments.journal import open_search, search_state
from nsa_harness.supervisor.experiments.launches import (
    BisectRequest,
    CannotLaunchError,
    EarlierRuns,
    Launches,
    Templates,
    check_outcome,
    find_earlier_runs,
    parse_templates,
    search_question,
)
from nsa_harness.supervisor.experiments.subjects import SubjectOptions, make_subject, program_arguments
from nsa_harness.supervisor.launch.launcher import shared_environment
from nsa_harness.supervisor.launch.planning import Invocation, Script, plan_launches
from nsa_harness.supervisor.storage.collect import step_time_s
from nsa_harness.supervisor.storage.rundir import RunOptions, create_run, find_run

FACTS = MachineFacts(host="h", cpus=2, gpus=(), torch="2.13.0")


@pytest.fixture
def typed(tmp_path: Path) -> Invocation:
    return Invocation(arguments=("gc_baseline_full",), working_dir=tmp_path, environ={})


def _script(question: Invocation, *args: str) -> Invocation:
    (question.working_dir / "train.py").write_text("print('trained')\n")
    return replace(question, arguments=(), script=Script(file="train.py", ranks=2, args=args))


def _request(question: Invocation, options: SubjectOptions, templates: Templates = Templates()) -> BisectRequest:  # noqa: B008
    question, subject = make_subject(options, question, templated=bool(templates), facts=FACTS)
    templates = templates.checked_for(subject)
    subject = replace(subject, in_a_row=templates.takes_range)
    return BisectRequest(
        question=question, subject=subject, templates=templates, base_args=program_arguments(question),
        sought=SoughtFailure(), confidence=0.95, repeat=1, jobs=1, budget_s=None, fork=True,
        options=RunOptions(command=""),
    )  # fmt: skip


def _launches(question: Invocation, options: SubjectOptions, templates: Templates = Templates()) -> Launches:  # noqa: B008
    return Launches(request=_request(question, options, templates), facts=FACTS)


def _refused(question: Invocation, options: SubjectOptions, templates: Templates = Templates()) -> str:  # noqa: B008
    with pytest.raises(UsageError) as refused:
        _launches(question, options, templates)
    return str(refused.value)


def test_no_scenario_named_means_the_gradient_checkpointing_baseline_of_the_plan(typed):
    launches = _launches(replace(typed, arguments=()), SubjectOptions(gc_range="auto"))
    assert launches.subject.question == "gc.layers in [0,12)"
    program = launches.spec((2, 6)).program
    assert program[program.index("--gc") + 1] == "2,6"
    assert launches.command((2, 6), None) == "nsa-harness run gc_baseline_full gc.layers=[2,6]"


def test_a_range_beyond_the_model_is_refused_before_anything_runs(typed):
    assert "the model has layers 0-11" in _refused(typed, SubjectOptions(gc_range="4:13"))
    assert "expected A:B with A below B" in _refused(typed, SubjectOptions(gc_range="4:4"))


def test_one_question_at_a_time(typed):
    assert "exactly one option that says what to vary" in _refused(typed, SubjectOptions())
    assert "--layers and --branch were given" in _refused(typed, SubjectOptions(layers="auto", branch=True))


def test_values_go_from_the_good_end_to_the_scenarios_own(typed):
    launches = _launches(typed, SubjectOptions(layers="auto"))
    assert (launches.subject.good, launches.subject.items[0], launches.subject.items[-1]) == (
        1,
        2,
        12,
    )
    assert launches.subject.ordered
    program = launches.spec(range(3)).program
    assert program[program.index("--layers") + 1] == "4"


def test_an_end_may_be_open_where_a_value_can_grow(typed):
    subject = _launches(typed, SubjectOptions(seq_len="64:")).subject
    assert (subject.open_end, subject.good, subject.items[0], subject.items[-1]) == (True, 64, 65, 64 * 1024)
    assert subject.question == "model.seq_len above 64, at most 65536"
    assert _launches(typed, SubjectOptions(layers="2:")).subject.items[-1] == 2048
    assert _launches(typed, SubjectOptions(seq_len="8192:")).subject.items[-1] == 8192 + 131_072
    assert not _launches(typed, SubjectOptions(layers="2:4")).subject.open_end
    assert "give the largest number, too, such as --world-size=1:8" in _refused(typed, SubjectOptions(world_size="1:"))
    assert "expected A:B with A below B" in _refused(typed, SubjectOptions(gc_range="1:"))
    assert "at most 1,048,576 values" in _refused(typed, SubjectOptions(seq_len="1:999999999"))


def test_a_search_has_an_end_and_knows_whether_its_subject_has_one(typed):
    options = SubjectOptions(seq_len="64:")
    question = search_question(_launches(typed, options).request)
    assert (question.unbounded, question.max_probes) == (True, 1000)
    assert total_probes(worst_case_stages(question)) < question.max_probes


def test_a_configuration_that_makes_no_launch_says_why(typed):
    question = replace(typed, arguments=("fault_deadlock", "fault.layer=3"))
    launches = _launches(question, SubjectOptions(layers="2:4"))
    with pytest.raises(CannotLaunchError, match=r"got 3; the model has layers 0-1"):
        launches.spec(())
    assert launches.spec((0, 1)).fault.layer == 3


def test_a_program_of_the_users_takes_the_choice_through_its_own_words_and_environment(typed):
    templates = parse_templates(["--gc-layers={layers}"], ["GC=on {layers}"])
    launches = _launches(_script(typed, "--steps", "3"), SubjectOptions(gc_range="0:8"), templates)
    spec = launches.spec((4, 5))
    assert spec.program == ("train.py", "--steps", "3", "--gc-layers=4,5")
    assert dict(spec.env)["GC"] == "on 4,5"
    assert launches.spec(()).program[-1] == "--gc-layers="
    assert launches.spec((4, 5)).spec_hash != launches.spec((4, 5, 6)).spec_hash
    assert search_question(launches.request).kind is QuestionKind.SET


@pytest.mark.parametrize("args", [("--gc={range}",), ("--gc={range}/{layers}", "--list={layers}")])
def test_a_program_that_takes_a_range_is_asked_for_neighbours_only(typed, args):
    launches = _launches(_script(typed), SubjectOptions(gc_range="2:8"), parse_templates(args, ["GC={range}"]))
    assert search_question(launches.request).kind is QuestionKind.RANGE
    assert launches.subject.question == "layers in [2,8), only in a row"
    assert dict(launches.spec((2, 3)).env)["GC"] == "4:6"
    assert dict(launches.spec(()).env)["GC"] == "0:0"
    typed_words = shlex.split(str(launches.command((2, 3), None)))
    filled = [word.format(range="4:6", layers="4,5") for word in args]
    assert (typed_words[0], typed_words[6:]) == ("GC=4:6", ["--", *filled])
    with pytest.raises(CannotLaunchError, match="are no range"):
        launches.spec((1, 4))


def test_of_a_program_that_takes_both_the_list_is_searched_and_the_range_left_out(typed):
    templates = parse_templates(["--gc-layers={layers}", "--gc={range}"], ["GC={range}"])
    launches = _launches(_script(typed), SubjectOptions(gc_range="0:8"), templates)
    assert search_question(launches.request).kind is QuestionKind.SET
    spec = launches.spec((1, 4))
    assert (spec.program, "GC" in dict(spec.env)) == (("train.py", "--gc-layers=1,4"), False)
    assert spec.notes[-1] == "{layers} says any choice of layers, so what has {range} in it is left out"


def test_a_variable_stands_before_the_command_where_that_does_the_same(typed, monkeypatch):
    def command(variable, question=None):
        templates = parse_templates([], [f"{variable}={{layers}}"])
        return _launches(question or _script(typed), SubjectOptions(gc_range="0:8"), templates).command((4, 5), None)

    assert command("GC") == "GC=4,5 nsa-harness run train.py --ranks 2"
    # What the harness reads itself, and what a word on its command line would override.
    assert command("NSA_GC").startswith("nsa-harness run train.py --ranks 2 'run.env.NSA_GC=")
    assert command("PYTHONHASHSEED").startswith("nsa-harness run")
    assert command("GC", replace(_script(typed), arguments=("run.env.GC=1",))).startswith("nsa-harness run")
    monkeypatch.setenv("GC", "4,5")
    spec = _launches(_script(typed), SubjectOptions(seq_len="1:8"), parse_templates(["{value}"], [])).spec(())
    assert shared_environment(spec)["GC"] == "4,5"


def test_the_command_for_people_repeats_a_script_with_its_words(typed):
    launches = _launches(_script(typed), SubjectOptions(seq_len="128:256"), parse_templates(["--seq={value}"], []))
    assert launches.command(range(4), None) == "nsa-harness run train.py --ranks 2 -- --seq=132"


def test_a_placeholder_that_nothing_fills_is_refused(typed):
    script = _script(typed)
    templates = parse_templates(["--gc={layer}"], [])
    assert '{layer} cannot be filled in; did you mean "layers"?' in _refused(
        script, SubjectOptions(gc_range="0:8"), templates
    )
    assert "has no placeholder" in _refused(script, SubjectOptions(gc_range="0:8"), parse_templates(["--gc"], []))
    assert "Add --arg" in _refused(script, SubjectOptions(gc_range="0:8"))
    assert "Add --arg" in _refused(script, SubjectOptions(any="batch=[1, 2]"))
    with pytest.raises(UsageError, match="expected NAME=TEXT"):
        parse_templates([], ["{layers}"])


def test_numbers_have_a_threshold_and_words_are_a_set(typed):
    script, templates = _script(typed), parse_templates(["--x={value}"], [])
    numbers = _launches(script, SubjectOptions(any="batch=[1, 2, 4.5]"), templates)
    assert (numbers.subject.form, numbers.subject.good) == (SubjectForm.VALUE, 1)
    words = _launches(script, SubjectOptions(any="augment=[flip, crop]"), templates)
    assert words.spec((0, 1)).program[-1] == "--x=flip,crop"
    assert "expected KEY=[A, B, ...]" in _refused(script, SubjectOptions(any="batch=4"), templates)
    assert "a value appears twice" in _refused(script, SubjectOptions(any="batch=[1, 1]"), templates)


def test_ordered_words_stay_as_they_were_written(typed):
    script, templates = _script(typed), parse_templates(["--v={value}"], [])
    launches = _launches(script, SubjectOptions(ordered='v=[1.90, 2.0, 2.0.1, "2.1"]'), templates)
    assert (launches.subject.good, launches.subject.items) == ("1.90", ("2.0", "2.0.1", "2.1"))
    assert launches.subject.question == "v in (1.90, 2.1]"
    assert launches.spec(()).program[-1] == "--v=1.90"
    assert launches.spec((0, 1)).program[-1] == "--v=2.0.1"
    assert launches.command((0,), None) == "nsa-harness run train.py --ranks 2 -- --v=2.0"
    assert search_question(launches.request).kind is QuestionKind.ORDERED
    assert "2.0 appears twice" in _refused(script, SubjectOptions(ordered="v=[2.0,2.0]"), templates).replace('"', "")
    for wrong in ("v=2.0", "v=[2.0]", "[1,2]", "v=[[1],[2]]", "v=[1,"):
        assert "--ordered: " in _refused(script, SubjectOptions(ordered=wrong), templates)


def test_ordered_words_reach_a_key_as_what_they_are_and_a_variable_as_their_text(typed):
    launches = _launches(typed, SubjectOptions(ordered="train.steps=[4, 2, 1]"))
    program = launches.spec((0,)).program
    assert program[program.index("--steps") + 1] == "2"
    variable = _launches(typed, SubjectOptions(ordered="run.env.PROTOCOL=[1.90, 2]"))
    assert dict(variable.spec(()).env)["PROTOCOL"] == "1.90"
    assert variable.command((), None) == "nsa-harness run gc_baseline_full 'run.env.PROTOCOL=\"1.90\"'"


def test_a_choice_sets_one_value_at_a_time(typed):
    launches = _launches(typed, SubjectOptions(choice="parallel.wrapper=[ddp, fsdp, none]"))
    assert launches.subject.question == "parallel.wrapper one of ddp, fsdp, none"
    words = [launches.command((place,), None) for place in range(3)]
    assert words[1] == "nsa-harness run gc_baseline_full parallel.wrapper=fsdp"
    assert len({launches.spec((place,)).program for place in range(3)}) == 3
    asked = search_question(launches.request)
    assert (asked.kind, asked.items, asked.flaky) == (QuestionKind.CHOICE, 3, False)
    shapes = _launches(
        _script(typed), SubjectOptions(choice="mesh=[[2,4],[4,2]]"), parse_templates(["--mesh={value}"], [])
    )
    assert [shapes.spec((place,)).program[-1] for place in range(2)] == ["--mesh=2,4", "--mesh=4,2"]
    assert "expected KEY=[A, B, ...]" in _refused(typed, SubjectOptions(choice="parallel.wrapper=ddp"))
    assert "can be set only in a scenario file" in _refused(typed, SubjectOptions(choice="extends=[a, b]"))


def test_seeds_are_a_choice_in_which_a_race_is_looked_for(typed):
    launches = _launches(typed, SubjectOptions(seeds="3:6"))
    program = launches.spec((2,)).program
    assert program[program.index("--seed") + 1] == "5"
    assert search_question(launches.request).flaky
    few = _launches(_script(typed), SubjectOptions(seeds="1,7,42"), parse_templates(["--seed={value}"], []))
    assert few.spec((2,)).program[-1] == "--seed=42"
    assert "2 to 64 seeds" in _refused(typed, SubjectOptions(seeds="3:4"))
    assert "expected A:B" in _refused(typed, SubjectOptions(seeds="3"))
    assert "--seeds: how does train.py get the value?" in _refused(_script(typed), SubjectOptions(seeds="0:4"))


def test_numbered_items_have_a_name_of_the_users(typed):
    script, templates = _script(typed), parse_templates(["--only={items}"], [])
    launches = _launches(script, SubjectOptions(items="batch=0:64"), templates)
    assert launches.subject.question == "batch in [0,64)"
    assert launches.spec((3, 9)).program[-1] == "--only=3,9"
    assert launches.subject.describe((3, 9)) == "batches 3 and 9"
    assert launches.subject.describe(range(64)) == "all 64 batches"
    wide = _launches(script, SubjectOptions(items="shard=0:8"), parse_templates([], ["SHARDS={range}"]))
    assert dict(wide.spec((2, 3)).env) == {"SHARDS": "2:4"}
    assert "expected NAME=A:B" in _refused(script, SubjectOptions(items="0:8"), templates)
    assert '{item} cannot be filled in; did you mean "items"?' in _refused(
        script, SubjectOptions(items="batch=0:8"), parse_templates(["--only={item}"], [])
    )


def test_two_files_are_told_apart_key_by_key(typed):
    (typed.working_dir / "good.yaml").write_text("extends: base/ddp\ntrain: {steps: 2}\nrun: {env: {A: x}}\n")
    (typed.working_dir / "bad.yaml").write_text(
        "extends: base/ddp\nabout: other words\nmodel: {attention: vanilla}\ngc: {layers: all}\n"
        "train: {steps: 3}\nrun: {env: {B: y}}\nlimits: {stall_s: 9}\n"
    )
    launches = _launches(replace(typed, arguments=()), SubjectOptions(set="good.yaml,bad.yaml"))
    assert set(launches.subject.items) == {
        "model.attention",
        "gc.layers",
        "train.steps",
        "run.env.A",
        "run.env.B",
    }
    everything = range(len(launches.subject.items))
    assert dict(launches.spec(everything).env).get("A") is None
    assert dict(launches.spec(everything).env)["B"] == "y"
    assert dict(launches.spec(()).env) == {"A": "x"}
    program = launches.spec(everything).program
    assert program[program.index("--steps") + 1] == "3"


def test_keys_that_mean_nothing_alone_travel_with_their_head(typed):
    (typed.working_dir / "good.yaml").write_text("extends: base/ddp\nparallel: {static_graph: true}\n")
    (typed.working_dir / "bad.yaml").write_text("extends: base/ddp\nparallel: {wrapper: manual}\ntrain: {steps: 4}\n")
    subject = _launches(replace(typed, arguments=()), SubjectOptions(set="good.yaml,bad.yaml")).subject
    (group,) = subject.together
    assert {subject.items[place] for place in group} == {"parallel.wrapper", "parallel.static_graph"}


def test_two_equal_scenarios_are_no_question(typed):
    (typed.working_dir / "good.yaml").write_text("extends: base/ddp\nabout: a\n")
    (typed.working_dir / "bad.yaml").write_text("extends: base/ddp\nabout: b\n")
    assert "differ in no key" in _refused(replace(typed, arguments=()), SubjectOptions(set="good.yaml,bad.yaml"))
    assert "--set already names the good and the bad scenario" in _refused(typed, SubjectOptions(set="a,b"))


def test_variables_are_left_unset_at_the_good_end(typed):
    question = replace(typed, arguments=("gc_baseline_full", "run.env.A=1", "run.env.B=2"))
    launches = _launches(question, SubjectOptions(env="auto"))
    assert dict(launches.spec(()).env) == {}
    assert dict(launches.spec((1,)).env) == {"B": "2"}
    assert launches.command((0,), Path("p03/spec.json")) == "nsa-harness run p03/spec.json"
    assert "the scenario does not set C" in _refused(question, SubjectOptions(env="C"))


def _git(repository: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(repository), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    root.mkdir()
    _git(root, "init", "-q", "-b", "main")
    _git(root, "config", "user.email", "a@b")
    _git(root, "config", "user.name", "a")
    for number in range(4):
        (root / "train.py").write_text(f"print({number})\n")
        _git(root, "add", ".")
        _git(root, "commit", "-qm", f"version {number}")
    return root


def test_a_commit_is_launched_in_a_worktree_of_its_own_and_the_users_checkout_stays(repository):
    question = Invocation(
        arguments=(), working_dir=repository, environ={}, script=Script(file="train.py", ranks=2, args=())
    )
    launches = _launches(question, SubjectOptions(commits="HEAD~3..HEAD"))
    assert [label.split(" ", 1)[1] for label in launches.subject.labels] == [
        "version 1",
        "version 2",
        "version 3",
    ]
    assert launches.spec((0, 1)).cwd is None
    command = launches.command((0, 1), None)
    assert command == f"git checkout {launches.subject.items[1]} && nsa-harness run train.py --ranks 2"
    with closing(Worktrees(repository=repository, home=repository.parent / "trees")) as trees:
        launches.use_worktrees(trees)
        spec = launches.spec((0, 1))
        assert (Path(spec.cwd) / "train.py").read_text() == "print(2)\n"
        assert (repository / "train.py").read_text() == "print(3)\n"
    assert not Path(spec.cwd).exists()
    assert len(_git(repository, "worktree", "list").splitlines()) == 1


def test_worktrees_are_removed_though_the_experiment_is_killed(repository: Path) -> None:
    program = f"""
import os, signal, sys
from pathlib import Path
from nsa_harness.supervisor.experiments.intermediate_configs import Worktrees
trees = Worktrees(repository=Path({str(repository)!r}), home=Path({str(repository.parent / "trees")!r}))
trees.checkout("HEAD")
print(trees._remover.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(killed.stdout)).wait(60)
    assert len(_git(repository, "worktree", "list").splitlines()) == 1
    assert not (repository.parent / "trees").exists()


def test_worktrees_are_removed_by_the_next_session_if_their_remover_was_killed_too(repository: Path) -> None:
    home = repository.parent / "trees"
    killed = Worktrees(repository=repository, home=home)
    killed.checkout("HEAD")
    assert killed._remover is not None
    killed._remover.kill()
    killed._remover.wait()
    assert len(_git(repository, "worktree", "list").splitlines()) == 2
    with closing(Worktrees(repository=repository, home=home)):
        pass  # every run has a result, so nothing is checked out
    assert len(_git(repository, "worktree", "list").splitlines()) == 1
    assert not home.exists()


def test_commits_that_are_none_or_no_ancestors_are_refused(repository):
    with pytest.raises(UsageError, match="is not a commit of the repository"):
        commits_between(repository, "nothere", "HEAD")
    with pytest.raises(UsageError, match="is not an ancestor of"):
        commits_between(repository, "HEAD", "HEAD~2")
    with pytest.raises(UsageError, match="there is no commit between"):
        commits_between(repository, "HEAD", "HEAD")
    with pytest.raises(UsageError, match="is not a commit of the repository"):
        commits_between(repository, "--all", "HEAD")


def test_a_search_that_was_killed_before_its_first_launch_tells_what_it_is_and_how_it_goes_on(
    typed: Invocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed where the search is about to open what it holds, of which the fork server alone takes seconds."""

    def killed(*_: object) -> NoReturn:
        raise SystemExit

    command = "nsa-harness bisect gc_baseline_full --gc-range"
    given = RunOptions(out=tmp_path / "reports", command=command)
    request = replace(_request(typed, SubjectOptions(gc_range="auto")), options=given)
    monkeypatch.setattr(bisect, "ForkServer", killed)
    with pytest.raises(SystemExit):
        bisect.run_bisection(request)
    assert rejudge(tmp_path / "reports" / "latest") == 125
    (run,) = (path for path in (tmp_path / "reports").iterdir() if not path.is_symlink())
    told = f"{run} is a bisection that ended before it had an answer (gc.layers in [0,12)), 0 probes made"
    assert capsys.readouterr().err == f"note: {told}; to continue it, give its command again: {command}\n"
    assert json.loads((run / "run.json").read_text())["command"] == command


def test_a_folder_that_is_no_run_is_not_recommended_as_one(tmp_path: Path) -> None:
    reports = tmp_path / "project" / "reports"  # what lies above is looked into as well
    (reports / "20260101T000000-dead").mkdir(parents=True)
    run = create_run(reports)
    run.record.write_text("{}")
    with pytest.raises(StoredRunError) as refused:
        find_run(reports / "20260101T000000-dead", reports)
    assert str(refused.value).endswith(f"the latest runs in {reports} are {run.run_id}")


def _stored(parent: Path, *ends: tuple[str, str, float]) -> str:
    """A run whose report says how these specs ended."""
    run = create_run(parent)
    outcomes = [{"spec_hash": one, "verdict": verdict, "timing": {"wall_s": took}} for one, verdict, took in ends]
    run.report.write_text(json.dumps({"outcomes": outcomes}))
    return run.run_id


def test_a_healthy_bad_end_is_asked_three_times_unless_somebody_insists_or_has_seen_it_fail(typed, tmp_path):
    launches = _launches(typed, SubjectOptions(gc_range="0:4"))
    request = launches.request
    assert search_question(request).controls == 3
    assert search_question(replace(request, confidence_requested=True)).controls == 14
    assert search_question(replace(request, confidence_requested=True, confidence=0.99)).controls == 21
    assert find_earlier_runs(launches, tmp_path / "none").notes == ()
    everything = launches.spec(range(4)).spec_hash
    run_id = _stored(tmp_path, (everything, "HANG", 8.0), (launches.spec(()).spec_hash, "PASS", 2.0))
    seen = find_earlier_runs(launches, tmp_path)
    assert (search_question(request, seen).controls, search_question(request, seen).flaky) == (14, False)
    (note,) = seen.notes
    assert f"HANG in {run_id}" in note
    assert (seen.run_s(("PASS",)), seen.run_s(("HANG",)), seen.run_s(("SKIP",)), seen.run_s()) == (2.0, 8.0, None, 5.0)
    assert find_earlier_runs(launches, tmp_path, but=run_id) == EarlierRuns()


def test_stored_runs_that_disagree_make_a_search_believe_no_answer_alone(typed, tmp_path):
    launches = _launches(typed, SubjectOptions(gc_range="0:4"))
    same = replace(typed, arguments=(*typed.arguments, "gc.layers=none"))
    (by_run,) = plan_launches(same, FACTS).specs
    first = _stored(tmp_path, (by_run.spec_hash, "PASS", 1.0))
    assert search_question(launches.request, find_earlier_runs(launches, tmp_path)).flaky is False
    second = _stored(tmp_path, (by_run.spec_hash, "FAIL", 1.0), ("another", "PASS", 1.0))
    seen = find_earlier_runs(launches, tmp_path)
    assert search_question(launches.request, seen).flaky
    (note,) = seen.notes
    assert f"PASS in {first} and FAIL in {second}" in note


def test_a_stored_report_that_cannot_be_read_tells_nothing(typed, tmp_path):
    launches = _launches(typed, SubjectOptions(gc_range="0:4"))
    for text in ("", "[]", '{"outcomes": [{}]}', '{"outcomes": [{"spec_hash": 1, "timing": 2}]}', '{"outcomes": 3}'):
        create_run(tmp_path).report.write_text(text)
    create_run(tmp_path)
    assert find_earlier_runs(launches, tmp_path) == EarlierRuns()


def test_the_dry_run_lists_each_case_with_its_time_where_runs_are_stored(typed, tmp_path, capsys):
    launches = _launches(typed, SubjectOptions(gc_range="0:4"))
    request = replace(launches.request, options=RunOptions(out=tmp_path / "reports", command=""))
    show_plan(request)
    assert "not known before the controls have run" in capsys.readouterr().out
    _stored(tmp_path / "reports", (launches.spec(range(4)).spec_hash, "HANG", 8.0))
    _stored(tmp_path / "reports", (launches.spec(()).spec_hash, "PASS", 2.0))
    show_plan(request)
    told = " ".join(capsys.readouterr().out.split())
    assert "the bad end never fails at most 15 probes 30.0 s" in told
    assert "a run takes 2.0 s if it passes and 8.0 s if it fails, according to 2 stored runs" in told
    assert "HANG in" in told
    one = next(case for case in possible_cases(search_question(request)) if case.name == "one item is enough").probes
    assert f"one item is enough at most {one} probes {5.0 * one:.1f} s" in told


def test_the_dry_run_of_a_choice_lists_every_value(typed, capsys):
    show_plan(_launches(typed, SubjectOptions(choice="parallel.wrapper=[ddp, fsdp]")).request)
    told = " ".join(capsys.readouterr().out.split())
    assert "each value ddp nsa-harness run gc_baseline_full parallel.wrapper=ddp value fsdp" in told
    assert "no value ever fails at most 6 probes" in told


def test_a_step_takes_what_the_boards_of_the_slower_rank_say(tmp_path):
    boards = Path(__file__).parents[1] / "evidence" / "loss_not_a_number" / "boards"
    attempt = create_run(tmp_path).attempt("p01")
    assert step_time_s(attempt, 2) is None
    for rank, name in enumerate(("11135", "11136")):
        attempt.rank(rank).mkdir(parents=True)
        (attempt.rank(rank) / "board").write_bytes(gzip.decompress((boards / f"{name}.board.gz").read_bytes()))
    assert step_time_s(attempt, 1) == pytest.approx(0.02648, abs=1e-5)
    assert step_time_s(attempt, 2) == pytest.approx(0.02794, abs=1e-5)
    (attempt.rank(1) / "board").write_bytes(b"torn")
    assert step_time_s(attempt, 2) == pytest.approx(0.02648, abs=1e-5)


def _good(n: int, step_s: float | None) -> ProbeReport:
    return ProbeReport(
        n=n, subset=(), purpose=Purpose.CONTROL_GOOD, open=(0, 4), left=0, in_full=False, launcher="fork",
        verdict="PASS", kind=None, cause=None, summary="", place=None, culprits=(), phase="exit",
        counts_as=ProbeResult.GOOD, wall_s=1.0, longest_quiet_s=None, dir=f"p{n:02d}", spec_hash="a", step_s=step_s,
    )  # fmt: skip


def test_three_runs_of_the_good_end_say_what_is_slow_and_no_later_one_does(typed):
    launches = _launches(typed, SubjectOptions(gc_range="0:4"))
    request = replace(launches.request, fork=False, sought=parse_outcome("slow"))
    assert search_question(request).baseline == 3
    assert search_question(replace(request, sought=parse_outcome("slow:9ms"))).baseline == 1
    with (
        open_search(RunOptions(out=typed.working_dir, command=""), search_state("", "", {}), dict) as folder,
        bisect._open(request, folder, launches, FACTS) as search,
    ):
        for n, step_s in enumerate((0.1, 0.12, 0.1), start=1):
            assert search.slow_from_s is None
            search._learn(_good(n, step_s))
        assert search.slow_from_s == pytest.approx(0.15)
        search._learn(_good(4, 9.0))
        assert search.slow_from_s == pytest.approx(0.15)
        assert search.notes == [
            "a step of 150 ms or more counts as slow; in 3 runs of the good end it takes 100 ms to 120 ms"
        ]
        search._learn(replace(_good(5, 0.4), purpose=Purpose.CONTROL_BAD, counts_as=ProbeResult.BAD))
        assert search.signature == Signature(verdict="slow", cause=None, place=None)


def test_a_rate_is_compared_with_nothing_side_by_side_and_in_a_choice_only_with_a_time(typed):
    layers = _launches(typed, SubjectOptions(gc_range="0:4")).subject
    choice = _launches(typed, SubjectOptions(choice="parallel.wrapper=[ddp, fsdp]")).subject
    check_outcome(parse_outcome("slow"), layers, 1)
    check_outcome(parse_outcome("hang"), choice, 4)
    check_outcome(parse_outcome("slow:200ms"), choice, 1)
    with pytest.raises(UsageError, match="remove --jobs"):
        check_outcome(parse_outcome("slow"), layers, 2)
    with pytest.raises(UsageError, match="such as slow:200ms"):
        check_outcome(parse_outcome("slow:2"), choice, 1)


def test_a_search_whose_terminal_is_gone_is_interrupted(typed):
    launches = _launches(typed, SubjectOptions(gc_range="auto"))
    request = replace(launches.request, fork=False)
    state = search_state("", "", {})
    with (
        open_search(RunOptions(out=typed.working_dir, command=""), state, dict) as folder,
        bisect._open(request, folder, launches, FACTS) as search,
    ):
        search.screen.lost_terminal()
        assert search.session.interruption.count == 1
