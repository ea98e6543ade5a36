"""The two launches of a claim: every form of the command line, and what is refused because nobody could tell."""

from __future__ import annotations

import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_harness.core.report import MachineFacts
from nsa_harness.errors import HarnessError, MissingNeed, UsageError
from nsa_harness.subject.computed import computed_numbers, decides_only_how, tolerance
from nsa_harness.supervisor.experiments.intermediate_configs import Worktrees, commit_of
from nsa_harness.supervisor.launch.planning import Invocation, Script
from nsa_harness.supervisor.launch.sides import LaunchSides, plan_sides

FACTS = MachineFacts(host="h", cpus=2, gpus=(), torch="2.13.0")


@pytest.fixture
def typed(tmp_path: Path) -> Invocation:
    return Invocation(arguments=(), working_dir=tmp_path, environ={})


def labels(sides: LaunchSides) -> tuple[str, str, str]:
    return sides.key, sides.first.label, sides.second.label


def refused(question: Invocation, *words: str) -> str:
    with pytest.raises(HarnessError) as error:
        plan_sides(replace(question, arguments=words), FACTS)
    return str(error.value)


def test_one_key_with_two_values_makes_two_sides_that_have_all_else_in_common(typed: Invocation) -> None:
    question = replace(typed, arguments=("ddp_onestep", "parallel.find_unused_parameters=false,true", "train.steps=2"))
    sides = plan_sides(question, FACTS)
    key = "parallel.find_unused_parameters"
    assert labels(sides) == (key, f"{key}=false", f"{key}=true")
    assert sides.scenario == "ddp_onestep"
    first, second = sides.first.spec, sides.second.spec
    different = [pair for pair in zip(first.program, second.program, strict=True) if pair[0] != pair[1]]
    assert different == [("--no-find-unused-parameters", "--find-unused-parameters")]
    assert first.scenario == f"ddp_onestep@{key}=false"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ddp_onestep", "gc.layers=none,all", "parallel.static_graph=false,true"),
         "differ in 2 settings: gc.layers and parallel.static_graph;"),
        (("ddp_onestep", "ddp_static_graph"), "in 3 settings: train.steps, parallel.static_graph and trace.buckets;"),
        (("ddp_onestep", "ddp_gloo", "gc.layers=none,all"), "in 2 settings: gc.layers and ddp_onestep and ddp_gloo"),
        (("ddp_onestep", "model.attention=nsa,stock", "model.impl=eager"), "model.impl"),
        (("ddp_onestep",), "the two sides of the claim do not differ"),
        (("ddp_onestep", "gc.layers=[0,1]"), "the two sides of the claim do not differ"),
        (("ddp_onestep", "train.steps=1,2,3"), "train.steps: a claim compares two values, and 3 are given"),
        (("ddp_onestep", "train.steps=2,2"), "2 appears twice"),
        (("sweep_gc", "train.steps=1,2"), "without a matrix; "),
        (("branch_pairs", "ddp_onestep"), "a claim needs one scenario"),
        (("ddp_onestep", "gc.mode=non_reentrant,reentrant"), "both sides do the same, because gc.mode has no effect"),
        (("single_no_gc", "parallel.static_graph=false,true"), "static_graph has no effect: the wrapper is none"),
    ],
)  # fmt: skip
def test_what_nobody_could_tell_apart_is_refused_and_each_key_is_named(
    typed: Invocation, words: tuple[str, ...], said: str
) -> None:
    assert said in refused(typed, *words)


def test_what_this_machine_cannot_launch_is_not_comparable(typed: Invocation) -> None:
    with pytest.raises(MissingNeed, match=r"not comparable: .* NCCL needs a GPU for each of 2 ranks"):
        plan_sides(replace(typed, arguments=("ddp_onestep", "needs.backend=gloo,nccl")), FACTS)


def test_a_key_that_decides_the_device_too_is_no_contrast(typed: Invocation) -> None:
    one_gpu = replace(FACTS, gpus=("H100",))
    with pytest.raises(UsageError, match=r"run\.ranks, backend and device"):
        plan_sides(replace(typed, arguments=("ddp_onestep", "run.ranks=1,2")), one_gpu)


def test_two_files_may_differ_in_one_key(typed: Invocation) -> None:
    for name, layers in (("before", "all"), ("after", "none")):
        text = (
            f"schema: 1\nabout: {name}\nextends: base/ddp_step\ngc: {{layers: {layers}}}\nexpect: {{verdict: HANG}}\n"
        )
        (typed.working_dir / f"{name}.yaml").write_text(text.replace("HANG", "HANG" if name == "before" else "PASS"))
    sides = plan_sides(replace(typed, arguments=("before.yaml", "after.yaml", "train.steps=3")), FACTS)
    assert labels(sides) == ("gc.layers", "gc.layers=all", "gc.layers=none")
    assert [side.spec.scenario for side in (sides.first, sides.second)] == ["before", "after"]


def test_a_fault_that_only_one_side_has_is_one_thing_and_two_of_its_keys_are_two(typed: Invocation) -> None:
    def with_fault(name: str, text: str) -> None:
        fault = f"fault: {{{text}}}\n" if text else ""
        (typed.working_dir / f"{name}.yaml").write_text(f"schema: 1\nextends: base/ddp_step\n{fault}")

    with_fault("sound", "")
    with_fault("hangs", "kind: deadlock, rank: 1, layer: 2")
    with_fault("seldom", "kind: deadlock, rank: 1, layer: 2, when: {chance: 0.3}")
    with_fault("raises", "kind: raise, rank: 0, layer: 2")
    found = plan_sides(replace(typed, arguments=("hangs.yaml", "sound.yaml")), FACTS)
    assert labels(found) == ("fault", "fault=deadlock", "fault=null")
    assert plan_sides(replace(typed, arguments=("hangs.yaml", "seldom.yaml")), FACTS).key == "fault.when"
    assert "fault.kind and fault.rank" in refused(typed, "hangs.yaml", "raises.yaml")


def test_words_of_a_script_are_given_to_one_side_each(typed: Invocation) -> None:
    (typed.working_dir / "train.py").write_text("print('trained')\n")
    question = replace(typed, script=Script(file="train.py", ranks=2, args=("--steps", "5")))
    sides = plan_sides(question, FACTS, arg=("", "--precision 'b f'"))
    assert labels(sides) == ("run.args", "no added arguments", "--precision 'b f'")
    assert sides.first.spec.program[-2:] == ("--steps", "5")
    assert sides.second.spec.program[-4:] == ("--steps", "5", "--precision", "b f")
    assert sides.first.spec.scenario != sides.second.spec.scenario
    by_variable = plan_sides(replace(question, arguments=("run.env.MODE=a,b",)), FACTS)
    assert labels(by_variable) == ("run.env.MODE", "run.env.MODE=a", "run.env.MODE=b")
    with pytest.raises(UsageError, match=r"2 settings: run\.env\.MODE and --arg"):
        plan_sides(replace(question, arguments=("run.env.MODE=a,b",)), FACTS, arg=("", "--x"))
    with pytest.raises(UsageError, match="do not differ"):
        plan_sides(question, FACTS, arg=("--x", "--x"))
    with pytest.raises(UsageError, match=r"--arg: .*quot"):
        plan_sides(question, FACTS, arg=("", "'"))


def git(repository: Path, *words: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    done = subprocess.run(["git", "-C", str(repository), *identity, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_two_commits_are_launched_each_in_a_checkout_of_its_own(typed: Invocation, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / "scenarios").mkdir(parents=True)
    git(repository, "init", "-q")
    for number in (1, 2):
        (repository / "train.py").write_text(f"print({number})\n")
        text = f"schema: 1\nrun: {{program: train.py, args: ['{number}']}}\n"
        (repository / "scenarios" / "own.yaml").write_text(text)
        git(repository, "add", "-A")
        git(repository, "commit", "-qm", f"number {number}")
    question = replace(typed, arguments=("own",), working_dir=repository)
    shas = (commit_of(repository, "HEAD~1")[:12], commit_of(repository, "HEAD")[:12])
    with closing(Worktrees(repository=repository, home=tmp_path / "trees")) as trees:
        sides = plan_sides(question, FACTS, commits=shas, tree_of=trees.checkout)
        folders = [Path(side.spec.cwd or "") for side in (sides.first, sides.second)]
        assert [(folder / "train.py").read_text() for folder in folders] == ["print(1)\n", "print(2)\n"]
    assert labels(sides) == ("commit", f"commit {shas[0]}", f"commit {shas[1]}")
    assert sides.notes == ("the scenario also differs between the commits: run.args",)
    assert sides.first.spec.spec_hash != sides.second.spec.spec_hash
    assert not (tmp_path / "trees" / shas[0]).exists()
    with pytest.raises(UsageError, match="given twice"):
        plan_sides(question, FACTS, commits=(shas[0], shas[0]))


# What both sides have to compute.


@pytest.mark.parametrize(
    ("key", "how"),
    [
        ("parallel.wrapper", True), ("gc.layers", True), ("run.env.NCCL_P2P_DISABLE", True), ("needs.backend", True),
        ("model.impl", True), ("model.compile", True), ("parallel.comm_hook", False), ("model.attention", False),
        ("model.implementation", False), ("model.dtype", False), ("train.steps", False), ("run.args", False),
        ("commit", False),
    ],
)  # fmt: skip
def test_a_key_that_decides_only_how_is_one_that_may_not_change_what_is_computed(key: str, how: bool) -> None:
    assert decides_only_how(key) is how


def test_the_numbers_of_a_training_are_its_loss_and_its_norm_step_by_step(typed: Invocation) -> None:
    rows = [{"step": 1.0, "loss": 5.5, "grad_norm": 2.0}, {"step": 2.0, "loss": 5.25}, {"step": "torn", "loss": 1.0}]
    found = computed_numbers({"training.csv": rows}.get)
    assert [(one.step, one.name, one.value) for one in found] == [
        (1, "loss", 5.5), (1, "grad_norm", 2.0), (2, "loss", 5.25),
    ]  # fmt: skip
    assert computed_numbers({}.get) == ()
    sides = plan_sides(replace(typed, arguments=("ddp_onestep", "model.dtype=float32,bfloat16")), FACTS)
    assert tolerance(sides.first.spec) < tolerance(sides.second.spec)
