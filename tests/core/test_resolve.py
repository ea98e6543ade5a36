"""Scenario + machine -> RunSpec or Skip."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from nsa_attention import config, settings
from nsa_harness.core.plan import Bound, Launcher, RunSpec, Skip
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.checks import check_scenario
from nsa_harness.core.scenario.program import Surroundings
from nsa_harness.core.scenario.resolve import resolve, settings_of
from nsa_harness.core.scenario.scenario import Scenario
from nsa_harness.core.scenario.yaml_tree import parse_yaml
from nsa_harness.subject.options import SHAPES
from nsa_harness.subject.program import PROGRAM

LAPTOP = MachineFacts(host="laptop", cpus=2, gpus=(), torch="2.13.0")
ONE_GPU = MachineFacts(host="desk", cpus=8, gpus=("A100",), torch="2.13.0")
TWO_GPUS = MachineFacts(host="box", cpus=64, gpus=("A100", "A100"), torch="2.13.0")
HERE = Surroundings(python="/usr/bin/python3", subject_dir="/srv/nsa", content_hash="c0ffee")


def scenario_of(text: str) -> Scenario:
    root = parse_yaml(f"name: s\n{text}", "s.yaml").root
    assert root is not None
    result = check_scenario(root, PROGRAM)
    assert result.scenario is not None, [str(mistake) for mistake in result.mistakes]
    return result.scenario


def spec_of(text: str, facts: MachineFacts = LAPTOP, where: Surroundings = HERE) -> RunSpec:
    spec = resolve(scenario_of(text), facts, where, PROGRAM)
    assert isinstance(spec, RunSpec)
    return spec


def test_every_option_of_nsa_train_is_spelled_out() -> None:
    spec = spec_of("train: {steps: 3, learning_rate: 0.00012345678, freeze: '*.gate_mlp.*'}\ngc: {layers: [3, 1]}")
    assert spec.launcher is Launcher.TORCHRUN
    assert " ".join(spec.program) == (
        "/srv/nsa --shape ci --layers 4 --seq-len 256 --attention nsa --branch all --no-stop-gradient-gates "
        "--no-compile --impl auto --dtype float32 --steps 3 --batch 2 --accumulate 1 --data synthetic --seed 0 "
        "--phase step --learning-rate 0.00012345678 --freeze *.gate_mlp.* --checkpoint-every 0 --keep-last 0 "
        "--no-async-checkpoint --gc 1,3 --gc-mode non_reentrant --wrapper ddp --no-static-graph "
        "--no-find-unused-parameters --broadcast-buffers --no-gradient-as-bucket-view "
        "--bucket-cap-mb 25.0 --comm-hook none --no-barrier-after-backward --backend "
        "gloo --device cpu --trace-grads --no-trace-module-bwd --no-trace-buckets --mem-dump-every 0 "
        "--no-profile-memory --no-detect-anomaly --no-step-cost --no-mem-snapshot --telemetry on --no-tensorboard"
    )


def test_without_a_gpu_the_cpu_form_is_chosen_aloud() -> None:
    spec = spec_of("")
    assert (spec.backend, spec.device) == ("gloo", "cpu")
    assert spec.subject == "shape ci (4 layers, dim 128, T 256, fp32)"
    assert spec.notes == ("CPU form, chosen because this machine has no GPU",)
    assert spec.not_covered == ("nccl", "bf16", "flash-attn")


def test_with_too_few_gpus_the_note_says_how_many_there_are() -> None:
    spec = resolve(scenario_of(""), ONE_GPU, HERE, PROGRAM)
    assert isinstance(spec, RunSpec)
    assert spec.notes == ("CPU form, chosen because this machine has 1 GPU for 2 ranks",)


def test_with_a_gpu_for_each_rank_the_production_form_is_chosen() -> None:
    spec = spec_of("gc: {layers: 0:6}", TWO_GPUS)
    assert (spec.backend, spec.device) == ("nccl", "cuda")
    assert spec.subject == (
        "shape production (12 layers, dim 768, T 2048, bf16), gradient checkpointing in layers 0-5 [0:6], non-reentrant"
    )
    assert spec.notes == ()
    assert spec.not_covered == ()


def test_gloo_on_gpus_stays_gloo() -> None:
    spec = spec_of("needs: {backend: gloo}", TWO_GPUS)
    assert (spec.backend, spec.device) == ("gloo", "cuda")


def test_what_is_asked_for_by_name_is_not_listed_as_not_covered() -> None:
    spec = spec_of("needs: {backend: gloo}\nmodel: {dtype: bfloat16}")
    assert spec.not_covered == ("flash-attn",)


@pytest.mark.parametrize(
    ("text", "facts", "reason"),
    [
        ("needs: {gpus: 2}", LAPTOP, "needs 2 GPUs; this machine has no GPU"),
        ("needs: {gpus: 4}", TWO_GPUS, "needs 4 GPUs; this machine has 2 GPUs"),
        ("needs: {backend: nccl}", ONE_GPU, "NCCL needs a GPU for each of 2 ranks; this machine has 1 GPU"),
        ("model: {impl: flash}", LAPTOP, "flash-attn needs a GPU for each of 2 ranks; this machine has no GPU"),
        ("model: {impl: triton}", ONE_GPU, "the fused kernels need a GPU for each of 2 ranks; this machine has 1 GPU"),
        (
            "model: {impl: torch}",
            LAPTOP,
            "torch's flash attention with a window needs a GPU for each of 2 ranks; this machine has no GPU",
        ),
        ("run: {program: a.py}\nneeds: {gpus: 1}", LAPTOP, "needs 1 GPU; this machine has no GPU"),
    ],
)
def test_asked_for_and_missing_is_a_skip_with_the_reason(text: str, facts: MachineFacts, reason: str) -> None:
    scenario = scenario_of(text)
    skip = Skip(scenario="s", about="", reason=reason, settings=settings_of(scenario))
    assert resolve(scenario, facts, HERE, PROGRAM) == skip


def test_one_rank_without_a_wrapper_is_plain_python() -> None:
    spec = spec_of("run: {ranks: 1, args: [--config, a.yaml]}\nparallel: {wrapper: none}")
    assert spec.launcher is Launcher.PLAIN
    assert spec.program[:2] == ("/usr/bin/python3", "/srv/nsa")
    assert spec.program[-2:] == ("--config", "a.yaml")
    assert spec.not_covered == ("bf16", "flash-attn")


@pytest.mark.parametrize(
    ("run", "launcher", "program"),
    [
        ("{program: train.py, args: [--lr, '1']}", Launcher.TORCHRUN, ("train.py", "--lr", "1")),
        ("{program: my.pkg.train}", Launcher.TORCHRUN, ("-m", "my.pkg.train")),
        ("{command: [srun, python, t.py]}", Launcher.PLAIN, ("srun", "python", "t.py")),
    ],
)
def test_a_foreign_program_is_launched_as_it_is(run: str, launcher: Launcher, program: tuple[str, ...]) -> None:
    spec = spec_of(f"run: {run}")
    assert (spec.launcher, spec.program) == (launcher, program)
    assert (spec.backend, spec.device) == ("any", "any")
    assert spec.notes == ()


def test_limits_are_auto_but_for_a_deadline_of_half_an_hour() -> None:
    limits = spec_of("limits: {stall_s: auto, busy_s: 90}").limits
    assert (limits.stall_s, limits.busy_s, limits.deadline_s) == (None, 90.0, 1800.0)
    assert spec_of("limits: {deadline_s: 60}").limits.deadline_s == 60.0


def test_expectations_and_the_fault_are_carried_over() -> None:
    spec = spec_of(
        "expect: {verdict: HANG, cause: infinite_loop, missing_grads: 0, metrics: {loss: {lt: 5, regex: 'l=(.*)'}}}\n"
        "fault: {kind: endless_loop, rank: 1, layer: 2, heals_s: 3}"
    )
    assert (spec.expect.verdict, spec.expect.cause, spec.expect.missing_grads) == ("HANG", "infinite_loop", 0)
    assert spec.expect.metrics == (("loss", Bound(lt=5.0, regex="l=(.*)")), ("steps", Bound(eq=1)))
    assert spec.fault is not None
    assert (spec.fault.kind, spec.fault.rank, spec.fault.layer, spec.fault.heals_s) == ("endless_loop", 1, 2, 3.0)


def test_static_graph_without_ddp_is_said_to_have_no_effect() -> None:
    notes = spec_of("parallel: {wrapper: manual, static_graph: true}").notes
    assert notes[-1] == "parallel.static_graph has no effect: the wrapper is manual"


@pytest.mark.parametrize("key", ["find_unused_parameters: true", "bucket_cap_mb: 2", "broadcast_buffers: false"])
def test_every_switch_of_ddp_is_said_to_have_no_effect_on_another_wrapper(key: str) -> None:
    idle = f"parallel.{key.split(':')[0]} has no effect: the wrapper is fsdp"
    assert spec_of(f"parallel: {{wrapper: fsdp, {key}}}").notes[-1] == idle
    assert idle not in spec_of(f"parallel: {{wrapper: ddp, {key}}}").notes


def test_bounds_in_units_of_the_uniform_loss_fit_the_shape_that_is_chosen() -> None:
    text = "expect: {metrics: {loss_last: {gt: 0.5, lt: 2, unit: uniform}, steps: {eq: 3}}}"
    on_gpus = resolve(scenario_of(text), TWO_GPUS, HERE, PROGRAM)
    assert isinstance(on_gpus, RunSpec)
    for spec, vocab in ((spec_of(text), 256), (on_gpus, 50257)):
        loss, steps = (bound for _, bound in spec.expect.metrics)
        assert loss == Bound(gt=0.5 * math.log(vocab), lt=2 * math.log(vocab))
        assert steps == Bound(eq=3.0)


def test_a_bound_for_one_device_is_left_out_on_another_and_said() -> None:
    text = "expect: {metrics: {tokens_per_s: {gt: 50, device: cuda}, loss_last: {lt: 9}}}"
    on_gpus = resolve(scenario_of(text), TWO_GPUS, HERE, PROGRAM)
    assert isinstance(on_gpus, RunSpec)
    assert [name for name, _ in on_gpus.expect.metrics] == ["loss_last", "steps", "tokens_per_s"]
    assert [name for name, _ in spec_of(text).expect.metrics] == ["loss_last", "steps"]
    assert spec_of(text).notes[-1] == "expect.metrics.tokens_per_s does not count: it is for cuda"


def test_a_cpu_takes_at_most_the_steps_that_are_meant_for_it() -> None:
    for asked, most, taken in ((10, 3, 3), (2, 3, 2), (10, "null", 10)):
        spec = spec_of(f"train: {{steps: {asked}, cpu_steps: {most}}}")
        assert spec.program[spec.program.index("--steps") + 1] == str(taken)
        assert dict(spec.settings)["train.steps"] == str(taken)
        assert any("in place of" in note for note in spec.notes) == (taken < asked)
        on_gpus = resolve(scenario_of(f"train: {{steps: {asked}, cpu_steps: {most}}}"), TWO_GPUS, HERE, PROGRAM)
        assert isinstance(on_gpus, RunSpec)
        assert on_gpus.program[on_gpus.program.index("--steps") + 1] == str(asked)


def test_a_fault_in_a_step_that_a_cpu_does_not_take_is_found_before_the_launch() -> None:
    text = "train: {steps: 10, cpu_steps: 3}\nfault: {kind: raise, rank: 0, layer: 0, step: 5}"
    (mistake,) = PROGRAM.beyond_the_model(scenario_of(text), LAPTOP)
    assert mistake == (("fault", "step"), "got 5; on a CPU there are 3 steps (train.cpu_steps)")
    assert list(PROGRAM.beyond_the_model(scenario_of(text), TWO_GPUS)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {loss: mean}", "--loss mean"),
        ("train: {clip: 0}", "--clip 0.0"),
        ("model: {compression: mean}", "--compression mean"),
        ("model: {stop_gradient_gates: true}", "--stop-gradient-gates"),
        ("model: {compile: true}", "--compile"),
        ("train: {checkpoint_every: 5}", "--checkpoint-every 5"),
        ("train: {keep_last: 3}", "--keep-last 3"),
        ("train: {async_checkpoint: true}", "--async-checkpoint"),
        ("train: {resume: a/checkpoint}", "--resume a/checkpoint"),
        ("parallel: {comm_hook: bf16}", "--comm-hook bf16"),
        ("parallel: {barrier_after_backward: true}", "--barrier-after-backward"),
    ],
)
def test_each_key_becomes_its_option(text: str, words: str) -> None:
    assert f" {words} " in f" {' '.join(spec_of(text).program)} "


def test_the_hash_does_not_know_where_things_lie() -> None:
    elsewhere = Surroundings(python="/home/x/bin/python", subject_dir="/home/x/nsa", content_hash="c0ffee")
    assert spec_of("").spec_hash == spec_of("", where=elsewhere).spec_hash
    alone = "run: {ranks: 1}\nparallel: {wrapper: none}"
    assert spec_of(alone).spec_hash == spec_of(alone, where=elsewhere).spec_hash
    assert spec_of("run: {program: a/t.py}").spec_hash == spec_of("run: {program: b/t.py}").spec_hash
    assert len(spec_of("").spec_hash) == 12


@pytest.mark.parametrize(
    "change",
    [
        "train: {steps: 2}",
        "run: {ranks: 3}",
        "run: {env: {NCCL_DEBUG: INFO}}",
        "gc: {layers: all}",
        "limits: {stall_s: 5}",
        "fault: {kind: raise, rank: 0, layer: 0}",
        "model: {seq_len: 128}",
    ],
)
def test_the_hash_changes_with_what_runs(change: str) -> None:
    assert spec_of(change).spec_hash != spec_of("").spec_hash


def test_the_hash_changes_with_the_source_and_not_with_words_for_people() -> None:
    assert spec_of("", where=replace(HERE, content_hash="other")).spec_hash != spec_of("").spec_hash
    assert spec_of("about: something\ntags: [a]\nexpect: {missing_grads: 0}").spec_hash == spec_of("").spec_hash


def test_layers_beyond_the_model_are_found_before_the_launch() -> None:
    scenario = scenario_of("gc: {layers: 6:12}\nfault: {kind: raise, rank: 0, layer: 4}")
    model = "the model has layers 0-3 (shape ci); set model.layers"
    assert list(PROGRAM.beyond_the_model(scenario, LAPTOP)) == [
        (("gc", "layers"), f"6:12 names layer 11; {model}"),
        (("fault", "layer"), f"got 4; {model}"),
    ]
    assert list(PROGRAM.beyond_the_model(scenario, TWO_GPUS)) == []


def test_the_table_of_shapes_is_the_subjects_own() -> None:
    theirs = {
        name: (shape.vocab, shape.layers, shape.dim, shape.seq_len, shape.batch, shape.dtype)
        for name, shape in config.SHAPES.items()
    }
    ours = {name: (s.vocab, s.layers, s.dim, s.seq_len, s.batch, s.dtype) for name, s in SHAPES.items()}
    assert ours == theirs


def test_every_option_the_plan_spells_is_one_that_the_subject_takes() -> None:
    spec = spec_of("model: {compression: mean}\ntrain: {learning_rate: 0.1, clip: 1, freeze: x}")
    parsed = settings.parser().parse_args(list(spec.program[1:]))
    assert parsed.shape == "ci"
    assert parsed.freeze == "x"


def test_settings_are_what_a_scenario_sets_as_the_command_line_would_write_it() -> None:
    scenario = scenario_of(
        """
gc: {layers: "0:4"}
run: {ranks: 2, args: [--quick], env: {NCCL_P2P_DISABLE: 1}}
parallel: {static_graph: true, bucket_cap_mb: 0.5}
"""
    )
    assert settings_of(scenario) == (
        ("gc.layers", "0:4"),
        ("parallel.bucket_cap_mb", "0.5"),
        ("parallel.static_graph", "true"),
        ("run.args", '["--quick"]'),
        ("run.env.NCCL_P2P_DISABLE", "1"),
    )


def test_our_program_must_do_the_steps_it_is_asked_for_and_a_foreign_one_counts_as_it_likes() -> None:
    assert dict(spec_of("train: {steps: 7}").expect.metrics) == {"steps": Bound(eq=7)}
    given = spec_of("train: {steps: 7}\nexpect: {metrics: {steps: {ge: 3}}}")
    assert dict(given.expect.metrics) == {"steps": Bound(ge=3)}
    assert spec_of("run: {program: a.py}").expect.metrics == ()
