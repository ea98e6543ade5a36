"""Environment names: which are refused, what is said of sound ones, and what is known to crash."""

from __future__ import annotations

import pytest
from test_resolve import HERE, LAPTOP, TWO_GPUS, scenario_of, spec_of

from nsa_harness.core.plan import RunSpec
from nsa_harness.core.scenario.env_names import (
    DEAD_NAMES,
    KNOWN_NAMES,
    OLD_NAMES,
    effect_notes,
    name_mistakes,
    sound_environment,
)
from nsa_harness.core.scenario.resolve import resolve
from nsa_harness.subject.environment import OVERRULED, TABLE
from nsa_harness.subject.program import PROGRAM


def mistake(name: str, value: str = "1", *, ours: bool = True) -> str | None:
    return dict(name_mistakes({name: value}, OVERRULED if ours else {})).get(name)


@pytest.mark.parametrize("name", sorted(OLD_NAMES))
def test_an_old_name_is_told_its_new_one_which_is_sound(name: str) -> None:
    assert mistake(name) == f"is an old name; write {OLD_NAMES[name]}"
    assert mistake(OLD_NAMES[name]) is None


@pytest.mark.parametrize("name", sorted(DEAD_NAMES))
def test_a_name_that_nothing_reads_is_refused_with_what_to_do(name: str) -> None:
    assert mistake(name) == f"nothing reads this variable; {DEAD_NAMES[name]}"
    assert mistake(name, ours=False) == mistake(name)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_name_that_a_key_says_is_refused_where_the_command_line_goes_before_it(name: str) -> None:
    said = mistake(name)
    assert said is not None
    assert said.endswith(f"set {TABLE[name][0]}")
    assert mistake(name, ours=False) is None


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("NCCL_P2P_DISABEL", "NCCL_P2P_DISABLE"),
        ("NCCL_IB_DISABLED", "NCCL_IB_DISABLE"),
        ("PYTORCH_CUDA_ALLOC_CONFIG", "PYTORCH_CUDA_ALLOC_CONF"),
        ("CUDA_LAUNCH_BLOCK", "CUDA_LAUNCH_BLOCKING"),
        ("TORCH_SHOW_CPP_STACKTRACE", "TORCH_SHOW_CPP_STACKTRACES"),
    ],
)
def test_a_slip_is_told_what_was_meant(slip: str, meant: str) -> None:
    assert mistake(slip) == f'nothing reads this variable; did you mean "{meant}"?'


@pytest.mark.parametrize("name", ["MY_OWN_SWITCH", "NCCL_OF_ANOTHER_YEAR", "TORCH_NCCL_BRAND_NEW_THING", "HF_HOME"])
def test_a_name_that_resembles_none_is_left_alone(name: str) -> None:
    assert mistake(name) is None


def test_every_known_name_is_sound() -> None:
    assert list(name_mistakes(dict.fromkeys(KNOWN_NAMES - {"TORCH_DISTRIBUTED_DEBUG"}, "1"), OVERRULED)) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TORCH_DISTRIBUTED_DEBUG", "detail", 'expected OFF, INFO or DETAIL, got "detail"'),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", None),
        (
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "2",
            'expected 1 or 3, got "2"; with another value, torch never ends a rank that hangs',
        ),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", None),
    ],
)
def test_a_value_that_the_name_does_not_take_is_refused(name: str, value: str, said: str | None) -> None:
    assert mistake(name, value) == said


ENV = {"NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1", "TORCH_SHOW_CPP_STACKTRACES": "1"}


@pytest.mark.parametrize(
    ("device", "backend", "notes"),
    [
        ("cpu", "gloo", ["no effect, because the device is cpu: CUDA_LAUNCH_BLOCKING, NCCL_P2P_DISABLE"]),
        ("cuda", "gloo", ["no effect, because the backend is gloo: NCCL_P2P_DISABLE"]),
        ("cuda", "nccl", []),
    ],
)
def test_a_sound_name_without_effect_is_said(device: str, backend: str, notes: list[str]) -> None:
    assert list(effect_notes(ENV, device=device, backend=backend)) == notes


def test_blocking_wait_is_said_to_take_the_watchdog() -> None:
    env = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    (note,) = effect_notes(env, device="cuda", backend="nccl")
    assert note == "TORCH_NCCL_BLOCKING_WAIT=1 disables NCCL's watchdog; only nsa-harness will notice a hang"


@pytest.mark.parametrize(
    ("torch", "backend", "ddp", "value"),
    [
        ("2.13.0+cpu", "gloo", True, "INFO"),
        ("2.13.1", "gloo", True, "INFO"),
        ("2.13.0", "nccl", True, "DETAIL"),
        ("2.13.0", "gloo", False, "DETAIL"),
        ("2.12.1", "gloo", True, "DETAIL"),
        (None, "gloo", True, "DETAIL"),
    ],
)
def test_detail_is_taken_away_only_where_it_crashes(torch: str | None, backend: str, ddp: bool, value: str) -> None:
    declared = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "A": "1"}
    env, notes = sound_environment(declared, torch=torch, backend=backend, ddp=ddp)
    assert env == {"TORCH_DISTRIBUTED_DEBUG": value, "A": "1"}
    assert bool(notes) == (value == "INFO")


DETAIL = "run: {env: {TORCH_DISTRIBUTED_DEBUG: DETAIL, NCCL_DEBUG: INFO}}"


def test_a_plan_on_gloo_says_aloud_what_it_took_in_place_of_detail() -> None:
    spec = spec_of(DETAIL)
    assert spec.env == (("NCCL_DEBUG", "INFO"), ("TORCH_DISTRIBUTED_DEBUG", "INFO"))
    assert spec.notes[1:] == (
        "no effect, because the device is cpu: NCCL_DEBUG",
        "TORCH_DISTRIBUTED_DEBUG is INFO instead of DETAIL, because DETAIL crashes DDP over gloo in torch 2.13.0",
    )
    on_gpus = resolve(scenario_of(DETAIL), TWO_GPUS, HERE, PROGRAM)
    assert isinstance(on_gpus, RunSpec)
    assert dict(on_gpus.env)["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert on_gpus.notes == ()


def test_a_foreign_program_keeps_its_environment_and_gets_notes() -> None:
    text = "run: {program: a.py, env: {NCCL_BLOCKING_WAIT: 1, NSA_GC_RANGE: x, TORCH_DISTRIBUTED_DEBUG: DETAIL}}"
    spec = resolve(scenario_of(text), LAPTOP, HERE, PROGRAM)
    assert isinstance(spec, RunSpec)
    assert dict(spec.env) == {"NCCL_BLOCKING_WAIT": "1", "NSA_GC_RANGE": "x", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert spec.notes == ("run.env.NCCL_BLOCKING_WAIT: is an old name; write TORCH_NCCL_BLOCKING_WAIT",)
