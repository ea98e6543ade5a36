"""Finding and reading scenario files: two places, parents, matrices, shadowing, and files that are no scenarios."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nsa_harness.core.scenario.checks import check_scenario
from nsa_harness.core.scenario.yaml_tree import origin_of
from nsa_harness.errors import ScenarioError
from nsa_harness.subject.program import PROGRAM
from nsa_harness.supervisor.launch.scenario_files import (
    SIZE_LIMIT_BYTES,
    Catalog,
    load_catalog,
    load_file,
    shipped_root,
    yaml_files,
)

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    root = tmp_path / "wheel" / "_scenarios"
    write(root / "base" / "ddp.yaml", "run: {ranks: 2}\ntags: [ddp]\n")
    write(root / "ddp_onestep.yaml", "extends: base/ddp\nabout: shipped\naliases: [onestep]\n")
    return root


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def mistakes_of(here: Path, shipped: Path) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        load_catalog(here, shipped)
    return list(caught.value.mistakes)


def names(catalog: Catalog) -> list[str]:
    return [declared.name for declared in catalog.scenarios]


def test_the_shipped_scenarios_are_sound_and_shipped_from_the_checkout() -> None:
    assert shipped_root() == REPOSITORY / "scenarios"
    catalog = load_catalog(REPOSITORY, shipped_root())
    assert {"ddp_onestep", "text_train", "fault_deadlock"} <= set(names(catalog))
    assert catalog.notes == ()


def test_every_shipped_fault_says_what_it_expects() -> None:
    catalog = load_catalog(REPOSITORY, shipped_root())
    scenarios = {declared.name: check_scenario(declared.tree, PROGRAM).scenario for declared in catalog.scenarios}
    found = {
        name: (scenario.fault.kind.value, scenario.expect.verdict.value, scenario.expect.cause, scenario.tags)
        for name, scenario in scenarios.items()
        if scenario is not None and scenario.fault is not None and "fault" in scenario.tags
    }
    assert found == {
        "fault_deadlock": ("deadlock", "HANG", "backward_function_blocked", ("fault",)),
        "fault_skip_collective": ("skip_collective", "HANG", "rank_conditional_collective", ("fault",)),
        "fault_gc_layer": ("deadlock", "HANG", "backward_function_blocked", ("fault",)),
        "fault_raise": ("raise", "FAIL", "exception", ("fault",)),
        "fault_sigkill": ("sigkill", "FAIL", "killed", ("fault",)),
        "fault_endless_loop": ("endless_loop", "HANG", "infinite_loop", ("fault",)),
        "fault_slow_step": ("slow_step", "PASS", None, ("fault",)),
    }


def test_shipped_files_tell_editors_where_the_schema_lies() -> None:
    for path in yaml_files(REPOSITORY / "scenarios"):
        first = path.read_text().splitlines()[0]
        schema = first.removeprefix("# yaml-language-server: $schema=")
        assert (path.parent / schema).resolve() == REPOSITORY / "scenarios" / "scenario.schema.json", path


def test_a_users_scenario_shadows_the_shipped_one_and_that_is_said(here: Path, shipped: Path) -> None:
    write(here / "scenarios" / "mine.yaml", "name: ddp_onestep\nabout: mine\n")
    catalog = load_catalog(here, shipped)
    assert [(declared.name, declared.file) for declared in catalog.scenarios] == [
        ("ddp_onestep", "scenarios/mine.yaml")
    ]
    assert catalog.notes == ("scenarios/mine.yaml shadows the shipped scenario ddp_onestep",)


def test_a_users_file_extends_a_shipped_parent_and_its_own_goes_first(here: Path, shipped: Path) -> None:
    write(here / "scenarios" / "a.yaml", "extends: base/ddp\n")
    scenario = check_scenario(load_catalog(here, shipped).scenarios[0].tree, PROGRAM).scenario
    assert scenario is not None
    assert scenario.tags == ("ddp",)
    write(here / "scenarios" / "base" / "ddp.yaml", "tags: [own]\n")
    catalog = load_catalog(here, shipped)
    tags = {d.name: check_scenario(d.tree, PROGRAM).scenario for d in catalog.scenarios}
    assert {name: scenario and scenario.tags for name, scenario in tags.items()} == {
        "a": ("own",),
        "ddp_onestep": ("ddp",),  # a shipped scenario never extends a user's file
    }


def test_a_child_inherits_keys_with_their_places_but_neither_name_nor_aliases(here: Path, shipped: Path) -> None:
    write(here / "scenarios" / "child.yaml", "extends: ddp_onestep\nrun: {ranks: 4}\n")
    (child,) = [d for d in load_catalog(here, shipped).scenarios if d.name == "child"]
    scenario = check_scenario(child.tree, PROGRAM).scenario
    assert scenario is not None
    assert (scenario.about, scenario.aliases, scenario.run.ranks) == ("shipped", (), 4)
    assert str(origin_of(child.tree, ("run", "ranks"))) == "scenarios/child.yaml:2:7"
    assert str(origin_of(child.tree, ("tags",))) == f"{shipped}/base/ddp.yaml:2:1"


def test_a_file_named_by_its_path_may_extend_its_neighbour(here: Path, shipped: Path) -> None:
    write(here / "deep" / "parent.yaml", "about: from next door\n")
    path = write(here / "deep" / "child.yaml", "extends: parent\n")
    scenario = check_scenario(load_file(path, here, shipped).tree, PROGRAM).scenario
    assert scenario is not None
    assert (scenario.name, scenario.about) == ("child", "from next door")


def test_the_mistakes_of_all_files_are_reported_at_once_and_each_once(here: Path, shipped: Path) -> None:
    write(here / "scenarios" / "base" / "p.yaml", "gc: {laiers: all}\n")
    write(here / "scenarios" / "a.yaml", "extends: base/p\ntrain: {stepps: 1}\n")
    write(here / "scenarios" / "b.yaml", "extends: base/p\n")
    write(here / "scenarios" / "sub" / "c.yml", "gc: {layers: 8:4}\n")
    assert sorted(mistakes_of(here, shipped)) == [
        'scenarios/a.yaml:2:9: train.stepps: unknown key; did you mean "steps"?',
        'scenarios/base/p.yaml:1:6: gc.laiers: unknown key; did you mean "layers"?',
        'scenarios/sub/c.yml:1:6: gc.layers: expected "start:stop" with start < stop, got "8:4"',
    ]


def test_a_value_that_only_the_child_makes_wrong_is_found_in_the_child(here: Path, shipped: Path) -> None:
    write(here / "scenarios" / "base" / "p.yaml", "train: {steps: 2}\n")
    write(here / "scenarios" / "a.yaml", "extends: base/p\nfault: {kind: raise, rank: 1, layer: 0, step: 3}\n")
    assert mistakes_of(here, shipped) == ["scenarios/a.yaml:2:41: fault.step: expected at most train.steps (2), got 3"]


@pytest.mark.parametrize(
    ("fault", "mistake"),
    [
        ("{kind: raise}", "fault: a raise fault needs a layer, such as `layer: 0`"),
        ("{kind: starved_loader}", "fault.step: expected at least 2,"),
        ("{kind: set_parameters}", 'fault.parameters: expected a pattern such as "*.norm.weight"'),
        ("{kind: leak, layer: 0, parameters: x}", "fault.parameters: only set_parameters has this key"),
        ("{kind: leak, layer: 0, heals_s: 3}", "fault.heals_s: a leak fault never heals;"),
        (
            "{kind: set_parameters, parameters: x, when: {seq_len: 9}}",
            "fault.when: a set_parameters fault does not happen in a layer",
        ),
        ("{kind: skip_collective, when: {ranks: 2}}", "fault.when: a skip_collective fault does not happen in a layer"),
        (
            "{kind: leak, layer: 0, when: {recomputed: [3]}}",
            "fault.when: a leak fault happens in every forward pass of its layer;",
        ),
        ("{kind: raise, layer: 0, when: {backend: mpi}}", "fault.when.backend: expected one of gloo, nccl"),
    ],
)
def test_a_fault_that_cannot_happen_is_a_mistake(here: Path, shipped: Path, fault: str, mistake: str) -> None:
    write(here / "scenarios" / "a.yaml", f"train: {{steps: 2}}\nfault: {fault}\n")
    (said,) = mistakes_of(here, shipped)
    assert mistake in said


@pytest.mark.parametrize(
    "fault",
    [
        "{kind: raise, layer: 0}",
        "{kind: starved_loader, step: 2}",
        "{kind: set_parameters, parameters: x, when: {ranks: 2}}",
        "{kind: leak, layer: 0, when: {seq_len: 9}}",
    ],
)
def test_a_fault_that_can_happen_is_none(here: Path, shipped: Path, fault: str) -> None:
    write(here / "scenarios" / "a.yaml", f"train: {{steps: 2}}\nfault: {fault}\n")
    assert "a" in names(load_catalog(here, shipped))


def test_a_finding_that_does_not_exist_cannot_be_expected(here: Path, shipped: Path) -> None:
    write(here / "scenarios" / "a.yaml", "expect: {findings: [memory_growth, memory_grows]}\n")
    (mistake,) = mistakes_of(here, shipped)
    assert mistake.endswith('expect.findings: unknown finding "memory_grows"; did you mean "memory_growth"?')


def test_every_variant_of_a_matrix_is_checked(here: Path, shipped: Path) -> None:
    write(here / "scenarios" / "a.yaml", "matrix: {gc.layers: [all, 8:4], gc.mode: [sideways]}\n")
    assert mistakes_of(here, shipped) == [
        'scenarios/a.yaml:1:27: gc.layers: expected "start:stop" with start < stop, got "8:4"',
        'scenarios/a.yaml:1:43: gc.mode: expected one of non_reentrant, reentrant, got "sideways"',
    ]


def test_circles_of_any_length_are_named(here: Path, shipped: Path) -> None:
    for name, parent in (("a", "b"), ("b", "c"), ("c", "a")):
        write(here / "scenarios" / f"{name}.yaml", f"extends: {parent}\n")
    circle = "scenarios/a.yaml -> scenarios/b.yaml -> scenarios/c.yaml -> scenarios/a.yaml"
    message = f"scenarios/c.yaml:1:1: extends: is circular: {circle}; remove one `extends`"
    assert message in mistakes_of(here, shipped)


def test_two_files_with_one_name_are_a_mistake(here: Path, shipped: Path) -> None:
    write(here / "scenarios" / "a.yaml", "about: first\naliases: [q]\n")
    write(here / "scenarios" / "b.yaml", "name: a\n")
    write(here / "scenarios" / "c.yaml", "aliases: [q]\n")
    assert mistakes_of(here, shipped) == [
        'scenarios/b.yaml:1:1: name: "a" is already the name or an alias of scenarios/a.yaml; rename one',
        'scenarios/c.yaml:1:1: aliases: "q" is already the name or an alias of scenarios/a.yaml; rename one',
    ]


def test_what_is_no_file_is_said_and_never_opened(here: Path, shipped: Path) -> None:
    (here / "scenarios" / "folder.yaml").mkdir(parents=True)
    os.mkfifo(here / "scenarios" / "pipe.yaml")
    (here / "scenarios" / "gone.yaml").symlink_to(here / "nothing")
    with (here / "scenarios" / "huge.yaml").open("wb") as huge:
        huge.truncate(10_000_000)
    assert sorted(mistakes_of(here, shipped)) == [
        "scenarios/folder.yaml:1:1: is a directory; a scenario is a file",
        "scenarios/gone.yaml:1:1: cannot be read: No such file or directory",
        f"scenarios/huge.yaml:1:1: has 10000000 bytes; a scenario file has at most {SIZE_LIMIT_BYTES}",
        "scenarios/pipe.yaml:1:1: is not a regular file",
    ]


def test_a_file_name_cannot_write_to_the_terminal(here: Path, shipped: Path) -> None:
    write(here / "scenarios" / "a\x1b[31m.yaml", "gc: 1\n")
    assert mistakes_of(here, shipped) == ["scenarios/a\\x1b[31m.yaml:1:1: gc: expected keys and values, got 1"]


def test_a_byte_order_mark_is_no_mistake(here: Path, shipped: Path) -> None:
    (here / "scenarios").mkdir()
    (here / "scenarios" / "a.yaml").write_bytes(b"\xef\xbb\xbfabout: x\n")
    assert "a" in names(load_catalog(here, shipped))


def test_a_place_without_scenarios_still_has_the_shipped_ones(here: Path, shipped: Path) -> None:
    assert names(load_catalog(here, shipped)) == ["ddp_onestep"]


SECRET = "not: [for, your, eyes"


def test_a_link_that_leads_out_of_the_scenarios_is_not_read(here: Path, shipped: Path) -> None:
    """A mistake in a file is told with its text, and a folder of scenarios may be somebody else's."""
    write(here / "elsewhere.yaml", SECRET)
    write(here / "scenarios" / "mine.yaml", "extends: base/ddp\n")
    (here / "scenarios" / "link.yaml").symlink_to(here / "elsewhere.yaml")
    (here / "scenarios" / "base").mkdir()
    (here / "scenarios" / "base" / "parent.yaml").symlink_to(here / "elsewhere.yaml")
    write(here / "scenarios" / "child.yaml", "extends: base/parent\n")
    what = "is a link that leads out of scenarios and is not read; put a copy there instead"
    expected = [f"scenarios/{name}.yaml:1:1: {what}" for name in ("base/parent", "link")]
    assert sorted(mistakes_of(here, shipped)) == expected
    with pytest.raises(ScenarioError) as named:
        load_file(here / "scenarios" / "link.yaml", here, shipped)
    assert named.value.mistakes == (f"scenarios/link.yaml:1:1: {what}",)


def test_a_link_within_the_scenarios_is_a_file_like_any_other(here: Path, shipped: Path) -> None:
    write(here / "scenarios" / "mine.yaml", "extends: base/ddp\n")
    (here / "scenarios" / "yours.yaml").symlink_to("mine.yaml")
    assert {"mine", "yours"} <= set(names(load_catalog(here, shipped)))


def test_a_broken_file_that_nobody_asked_for_is_said_and_the_others_run(here: Path, shipped: Path) -> None:
    write(here / "scenarios" / "good.yaml", "about: mine\nrun: {program: train.py}\n")
    write(here / "scenarios" / "bad.yaml", "about: [\n")
    catalog = load_catalog(here, shipped, ["good"])
    assert "good" in names(catalog)
    assert [note.split(" ")[:3] for note in catalog.notes] == [["not", "read:", "scenarios/bad.yaml:2:1:"]]
    for words in ([], ["bad"], ["good", "bad"], ["g*"]):
        with pytest.raises(ScenarioError, match=r"bad\.yaml:2:1"):
            load_catalog(here, shipped, words)


def test_two_files_that_claim_the_name_that_was_asked_for_are_an_error(here: Path, shipped: Path) -> None:
    for file in ("one.yaml", "two.yaml"):
        write(here / "scenarios" / file, "name: good\nabout: mine\nrun: {program: train.py}\n")
    with pytest.raises(ScenarioError, match="good"):
        load_catalog(here, shipped, ["good"])
