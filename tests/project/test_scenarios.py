"""The scenarios that ship: they load, resolve on every kind of machine, cover the seeds, and their numbers bite."""

from __future__ import annotations

import fnmatch
import json
import math
import re
from functools import cache
from itertools import pairwise

import pytest
from documents import REPOSITORY, rows, words
from mission import BEYOND, ITEMS, SEED_1, SEED_5, SEED_FAILURES, WITHOUT_A_CPU_FORM

from nsa_harness.core.evidence.evidence import Ending, Evidence
from nsa_harness.core.outcome.expectations import missed_expectations
from nsa_harness.core.plan import Bound, Expect, Limits, RunSpec, Skip
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.program import Surroundings
from nsa_harness.core.scenario.resolve import resolve
from nsa_harness.core.scenario.scenario import ExpectedVerdict, Scenario
from nsa_harness.core.scenario.selection import Selection, select_items
from nsa_harness.subject.options import SHAPES
from nsa_harness.subject.program import PROGRAM
from nsa_harness.supervisor.launch.planning import SelectedScenario, all_scenarios, check_scenarios
from nsa_harness.supervisor.launch.scenario_files import yaml_files

LAPTOP = MachineFacts(host="laptop", cpus=2, gpus=(), torch="2.13.0+cpu")
DESK = MachineFacts(host="desk", cpus=8, gpus=("A100",), torch="2.13.0")
BOX = MachineFacts(host="box", cpus=64, gpus=("A100", "A100"), torch="2.13.0")
HERE = Surroundings(python="/usr/bin/python3", subject_dir="/srv/nsa", content_hash="c0ffee")
# Bounds of metrics look at none of it.
NOTHING_SEEN = Evidence(
    node="n", world_size=2, backend="gloo", ending=Ending.EXITED, limits=Limits(), ended_s=1.0, launch_s=None,
    teardown_s=0.0, launcher=None, launcher_error=None, ranks=(), exits=(), snapshots=(), samples=(),
    last_progress_s=None, leftovers=(), unkillable=(), metrics={}, trouble=(),
)  # fmt: skip


@cache
def shipped() -> dict[str, tuple[SelectedScenario, Scenario]]:
    """Every shipped scenario by its name, those of the user left out."""
    items, _ = all_scenarios(REPOSITORY / "tests" / "golden")
    return {item.name: (item, scenario) for item, scenario in zip(items, check_scenarios(items), strict=True)}


def on(facts: MachineFacts) -> dict[str, RunSpec | Skip]:
    return {name: resolve(scenario, facts, HERE, PROGRAM) for name, (_, scenario) in shipped().items()}


def order_of(tag: str) -> list[str]:
    items = [item for item, _ in shipped().values()]
    return [item.name for item in select_items(items, Selection(tags=(tag,)))]


@pytest.mark.parametrize("facts", [LAPTOP, DESK, BOX], ids=lambda facts: facts.host)
def test_every_scenario_resolves_to_a_model_that_has_its_layers(facts: MachineFacts) -> None:
    for name, (_, scenario) in shipped().items():
        assert list(PROGRAM.beyond_the_model(scenario, facts)) == [], name
        assert isinstance(resolve(scenario, facts, HERE, PROGRAM), RunSpec | Skip), name


def test_without_a_gpu_only_what_has_no_cpu_form_is_skipped_and_each_says_why() -> None:
    skips = {name: spec.reason for name, spec in on(LAPTOP).items() if isinstance(spec, Skip)}
    assert skips == WITHOUT_A_CPU_FORM


def test_every_cpu_form_is_said_aloud_and_small_enough_for_a_laptop() -> None:
    for name, spec in on(LAPTOP).items():
        if isinstance(spec, Skip) or not shipped()[name][1].is_ours:
            continue
        assert (spec.backend, spec.device) == ("gloo", "cpu"), name
        assert spec.notes[0] == "CPU form, chosen because this machine has no GPU", name
        shape = SHAPES[re.match(r"shape (\w+)", spec.subject)[1]]  # type: ignore[index]
        # "cost": a few of its layers, to foretell what all cost.
        assert shape.vocab == 256 or "cost" in spec.tags or name in OF_PRODUCTION, name


# At the size of production, in a few steps.
OF_PRODUCTION = ("production", "shake", "production_dtype@model.dtype=float32", "production_dtype@model.dtype=bfloat16")


@pytest.mark.parametrize("name", OF_PRODUCTION)
def test_a_production_scenario_has_a_cpu_form_of_a_few_steps_and_says_so(name: str) -> None:
    small, large = (on(facts)[name] for facts in (LAPTOP, BOX))
    assert isinstance(small, RunSpec)
    assert isinstance(large, RunSpec)
    asked = shipped()[name][1].train.steps
    steps = [int(one.program[one.program.index("--steps") + 1]) for one in (small, large)]
    assert steps == [3, asked]
    assert [dict(one.settings)["train.steps"] for one in (small, large)] == [str(step) for step in steps]
    assert [dict(one.expect.metrics)["steps"].eq for one in (small, large)] == steps
    said = f"3 optimizer steps in place of {asked}: train.cpu_steps; null does them all"
    assert (said in small.notes) == (asked > 3)
    assert said not in large.notes
    same = ("--shape", "--layers", "--seq-len", "--batch", "--gc", "--wrapper")
    assert [[one.program[one.program.index(word) + 1] for word in same] for one in (small, large)] == [
        [name.partition("_")[0].partition("@")[0], "12", "1024" if name == "shake" else "2048", *rest]
        for rest in [["2" if name == "production" else "1", "all", "ddp"]] * 2
    ]


def test_a_bound_for_one_device_counts_on_no_other_and_that_is_said() -> None:
    small, large = (on(facts)["production"] for facts in (LAPTOP, BOX))
    assert isinstance(small, RunSpec)
    assert isinstance(large, RunSpec)
    assert dict(large.expect.metrics)["tokens_per_s"].gt == 50
    assert "tokens_per_s" not in dict(small.expect.metrics)
    assert "expect.metrics.tokens_per_s does not count: it is for cuda" in small.notes


def test_a_box_with_two_gpus_skips_nothing() -> None:
    assert [name for name, spec in on(BOX).items() if isinstance(spec, Skip)] == []


def test_a_box_with_two_gpus_runs_the_production_shape_in_each_scenario_that_names_no_other() -> None:
    specs = on(BOX)
    for name, (_, scenario) in shipped().items():
        spec = specs[name]
        assert isinstance(spec, RunSpec)
        if not scenario.is_ours:
            continue
        assert spec.device == "cuda", name
        if scenario.model.shape == "auto":
            assert spec.subject.startswith("shape production "), name


def test_a_machine_with_one_gpu_runs_single_scenarios_on_it_and_the_others_on_the_cpu() -> None:
    specs = on(DESK)
    single, pair = specs["single_gc"], specs["ddp_standard"]
    assert isinstance(single, RunSpec)
    assert isinstance(pair, RunSpec)
    assert (single.device, pair.device) == ("cuda", "cpu")
    assert "1 GPU for 2 ranks" in pair.notes[0]


@pytest.mark.parametrize("directory", SEED_5)
def test_every_directory_name_of_the_seeds_plan_selects_one_scenario(directory: str) -> None:
    items = [item for item, _ in shipped().values()]
    (found,) = select_items(items, Selection(patterns=(directory,)))
    assert directory in (found.name, *found.aliases)


def test_the_plan_runs_in_the_order_of_the_seeds_with_nccl_beside_gloo_and_ends_with_the_controls() -> None:
    known_as = {known: item.name for item, _ in shipped().values() for known in (item.name, *item.aliases)}
    in_order = [known_as[directory] for directory in SEED_5]
    plan = order_of("plan")
    controls = ["gc_baseline_none", "single_no_gc", "manual_average", "control_vanilla"]
    checkpointed = {name for name in plan if name.startswith("ddp_gc")} | {"gc_baseline_reentrant"}
    assert [name for name in plan if name != "ddp_nccl" and name not in checkpointed] == in_order + controls
    assert len(checkpointed) == 5
    assert plan.index("ddp_nccl") == plan.index("ddp_gloo") + 1


def test_every_mitigation_of_the_seeds_is_a_variant_beside_one_control() -> None:
    variants = order_of("variants")
    assert [name for name in variants if name in SEED_1] == list(SEED_1)
    assert variants.index("ddp_standard") < variants.index(SEED_1[0])
    assert set(variants) >= {"ddp_safe_mode", "ddp_no_sync", "manual_average", "fsdp1", "fsdp2"}


def test_every_scenario_answers_a_line_of_the_mission_or_is_a_planted_fault_or_goes_beyond_it() -> None:
    patterns = [pattern for item in ITEMS for pattern in item.scenarios]
    others = [name for name in shipped() if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    assert sorted(name for name in others if not name.startswith(("fault_", "seed_"))) == sorted(BEYOND)


def test_every_failure_of_the_seeds_stands_under_one_tag_and_its_healthy_twin_under_another() -> None:
    assert set(order_of("seed-failures")) == set(SEED_FAILURES)
    assert set(order_of("seed-twins")) == {f"{name}_healthy" for name in SEED_FAILURES}


@pytest.mark.parametrize(("name", "key"), SEED_FAILURES.items())
def test_a_failure_of_the_seeds_differs_from_its_healthy_twin_in_one_key(name: str, key: str) -> None:
    failing, twin = (shipped()[one][1] for one in (name, f"{name}_healthy"))
    told = ("name", "about", "tags", "expect")
    planted, sound = (flat(one.model_dump(mode="json", exclude=set(told))) for one in (failing, twin))
    differ = {one for one in {*planted, *sound} if planted.get(one) != sound.get(one)}
    assert {one for one in differ if one.startswith(key)} == differ != set()
    assert failing.expect.cause or failing.expect.findings, "what must be named"
    assert (twin.expect.verdict, twin.expect.cause, twin.expect.findings) == (ExpectedVerdict.PASS, None, ())
    assert twin.expect.metrics == failing.expect.metrics


def flat(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def changes(name: str, against: str) -> dict[str, object]:
    """What one scenario sets other than another, in the sections that decide what runs."""
    sections = ("run", "model", "train", "gc", "parallel")
    mine, theirs = (shipped()[one][1].model_dump(mode="json", include=set(sections)) for one in (name, against))
    flat = [{f"{s}.{key}": value for s in sections for key, value in side[s].items()} for side in (mine, theirs)]
    return {key: value for key, value in flat[0].items() if flat[1][key] != value}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("ddp_find_unused", {"parallel.find_unused_parameters": True}),
        ("ddp_conservative_kernels", {"model.impl": "eager"}),
        ("ddp_stop_gradient_gates", {"model.stop_gradient_gates": True}),
        ("ddp_safe_mode", {"model.impl": "eager", "model.stop_gradient_gates": True}),
        ("ddp_bucket_2mb", {"parallel.bucket_cap_mb": 2.0}),
        ("ddp_no_broadcast", {"parallel.broadcast_buffers": False}),
        ("ddp_bucket_view", {"parallel.gradient_as_bucket_view": True}),
        ("ddp_static_graph", {"parallel.static_graph": True}),
        ("ddp_no_sync", {"train.accumulate": 4}),
        ("ddp_barrier", {"parallel.barrier_after_backward": True}),
        ("ddp_comm_hook", {"parallel.comm_hook": "bf16"}),
        ("ddp_gc", {"gc.layers": "all"}),
        ("manual_average", {"parallel.wrapper": "manual"}),
        ("control_vanilla", {"model.attention": "vanilla"}),
        ("ddp_compile", {"model.compile": True}),
        ("ddp_flash", {"model.impl": "flash"}),
        ("ddp_fused_kernels", {"model.impl": "triton"}),
    ],
)
def test_a_variant_differs_from_its_control_in_nothing_but_its_question(name: str, changed: dict[str, object]) -> None:
    assert changes(name, "ddp_standard") == changed


@pytest.mark.parametrize(("name", "wrapper"), [("fsdp1", "fsdp1"), ("fsdp2", "fsdp")])
def test_a_sharded_model_differs_from_checkpointing_under_ddp_in_the_wrapper_alone(name: str, wrapper: str) -> None:
    assert changes(name, "ddp_gc") == {"parallel.wrapper": wrapper}


@pytest.mark.parametrize(("name", "layers"), [("gc_bisect_layers_0_5", "0:6"), ("gc_bisect_layers_6_11", "6:12")])
def test_the_halves_of_the_layers_differ_from_their_baseline_in_the_range_alone(name: str, layers: str) -> None:
    assert changes(name, "gc_baseline_full") == {"gc.layers": layers}


@pytest.mark.parametrize("layers", [4, 5])
def test_the_reproduction_and_its_stock_control_differ_in_the_attention_alone(layers: int) -> None:
    name, control = f"repro@model.layers={layers}", f"repro_stock@model.layers={layers}"
    assert changes(control, name) == {"model.attention": "stock"}
    assert shipped()[name][1].train.loss == "mean"


@pytest.mark.parametrize("sweep", ["sweep_layers", "sweep_seq_len"])
def test_a_sweep_runs_from_small_to_large(sweep: str) -> None:
    values = [int(name.partition("=")[2]) for name in order_of("sweep") if name.startswith(f"{sweep}@")]
    assert len(values) >= 5
    assert all(before < after for before, after in pairwise(values))


def test_every_scenario_that_expects_a_pass_expects_a_number_too() -> None:
    healthy = {
        name: scenario.expect
        for name, (_, scenario) in shipped().items()
        if scenario.expect.verdict is ExpectedVerdict.PASS and scenario.fault is None
    }
    assert len(healthy) > 60
    assert [name for name, expect in healthy.items() if not expect.metrics] == []


def violations(bound: Bound) -> list[float]:
    """A number beyond each end of a bound, just outside, and not a number at all."""
    found = [math.nan]
    found += [limit for limit in (bound.lt, bound.gt) if limit is not None]
    found += [math.nextafter(limit, math.inf) for limit in (bound.le, bound.eq) if limit is not None]
    found += [math.nextafter(limit, -math.inf) for limit in (bound.ge, bound.eq) if limit is not None]
    return found


@pytest.mark.parametrize("facts", [LAPTOP, BOX], ids=lambda facts: facts.host)
def test_every_number_a_scenario_expects_can_be_missed_and_can_be_met(facts: MachineFacts) -> None:
    for name, spec in on(facts).items():
        for metric, bound in spec.expect.metrics if isinstance(spec, RunSpec) else ():
            alone = Expect(metrics=((metric, bound),))
            assert missed_expectations(alone, NOTHING_SEEN, {metric: inside(bound)}) == (), f"{name}: {metric}"
            for value in violations(bound):
                assert missed_expectations(alone, NOTHING_SEEN, {metric: value}) != (), f"{name}: {metric} {value}"
            assert missed_expectations(alone, NOTHING_SEEN, {}) != (), f"{name}: {metric} is not reported"


def inside(bound: Bound) -> float:
    low = max((value for value in (bound.gt, bound.ge, bound.eq) if value is not None), default=None)
    high = min((value for value in (bound.lt, bound.le, bound.eq) if value is not None), default=None)
    if low is None or high is None:
        return low + 1 if low is not None else (high or 0) - 1
    return (low + high) / 2


@pytest.mark.parametrize("facts", [LAPTOP, BOX], ids=lambda facts: facts.host)
def test_an_untrained_model_that_guesses_meets_the_bound_of_its_shape_and_of_no_other(facts: MachineFacts) -> None:
    spec = on(facts)["ddp_standard"]
    assert isinstance(spec, RunSpec)
    bound = dict(spec.expect.metrics)["loss_last"]
    alone = Expect(metrics=(("loss_last", bound),))
    met = [
        vocab
        for vocab in (256, 50257)
        if missed_expectations(alone, NOTHING_SEEN, {"loss_last": math.log(vocab)}) == ()
    ]
    assert met == ([256] if facts is LAPTOP else [50257])


def test_steps_expected_are_the_steps_asked_for() -> None:
    for name, (_, scenario) in shipped().items():
        if "steps" in scenario.expect.metrics:
            assert scenario.expect.metrics["steps"].eq == scenario.train.steps, name


# As seed 5 exports them, but DETAIL; NCCL_ASYNC_ERROR_HANDLING by the name that torch has for it now.
OF_THE_SEEDS = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:256",
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "NCCL_DEBUG": "INFO",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
}


def test_the_environment_of_the_seeds_is_that_of_every_scenario_of_the_plan() -> None:
    for name, (item, one) in shipped().items():
        if {"plan", "variants", "control"} & set(item.tags):
            assert OF_THE_SEEDS.items() <= one.run.env.items(), name
        if name.startswith(("fault_", "seed_")):
            assert not OF_THE_SEEDS.keys() & one.run.env.keys(), name


def test_gloo_and_nccl_differ_in_the_backend_alone() -> None:
    both = [
        shipped()[name][1].model_dump(exclude={"name", "about", "tags", "aliases", "priority"}) for name in BACKENDS
    ]
    assert [one.pop("needs")["backend"] for one in both] == ["gloo", "nccl"]
    assert both[0] == both[1]


BACKENDS = ("ddp_gloo", "ddp_nccl")


def test_every_tag_of_the_groups_is_documented_and_has_a_scenario() -> None:
    documented = {words(cells[0])[0] for cells in rows("docs/scenarios.md", "tag", "scenarios")}
    used = {tag for item, _ in shipped().values() for tag in item.tags}
    assert documented <= used
    assert documented >= {"plan", "variants", "sweep", "control", "ready", "fault", "seed-failures", "seed-twins"}


def test_no_two_scenarios_share_a_name_or_an_alias() -> None:
    families = {item.family: item.aliases for item, _ in shipped().values()}
    known = [*families, *(alias for aliases in families.values() for alias in aliases)]
    assert sorted(known) == sorted(set(known))


def test_every_scenario_names_the_schema_for_editors_by_a_path_that_leads_to_it() -> None:
    for path in yaml_files(REPOSITORY / "scenarios"):
        first = path.read_text().splitlines()[0]
        target = first.partition("$schema=")[2]
        assert json.loads((path.parent / target).read_text())["title"] == "nsa-harness scenario", path.name
