"""What grows how: forms that predict, intervals that hold, and what is refused across a change of implementation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import worded
from runs import run

from nsa_harness.core.comparison.sweeps import NoPrediction, Sweep, no_fit_reason, sweeps, with_growth_findings
from nsa_harness.core.experiment.statistics import student_quantile
from nsa_harness.core.fits import CONFIDENCE, Fit, Point, Quantity, Size, fit_points
from nsa_harness.core.report import Outcome, Status, StepCost

LENGTHS = (256, 512, 768, 1024, 1280, 1536, 1792, 2048)
FAR = Size(tokens=8192, layers=2)


def points(
    cost: Callable[[int], float], noise: float = 0.0, lengths: Sequence[int] = LENGTHS, seed: int = 1
) -> list[Point]:
    chance = random.Random(seed)
    return [
        Point(size=Size(tokens=tokens, layers=2), value=cost(tokens) * (1 + chance.gauss(0, noise)), error=noise)
        for tokens in lengths
    ]


def fit_of(made: Sequence[Point]) -> Fit:
    fit = fit_points(Quantity.SECONDS, made)
    assert fit is not None
    return fit


FORMS = {
    "constant": lambda _: 0.3,
    "linear": lambda tokens: 0.05 + 1e-4 * tokens,
    "quadratic beside a constant": lambda tokens: 0.05 + 1e-4 * tokens + 3e-8 * tokens**2,
    "quadratic": lambda tokens: 1e-7 * tokens**2,
    "a power between": lambda tokens: 1e-4 * tokens**1.5,
}


def test_the_quantiles_are_those_of_the_tables() -> None:
    table = {1: 12.706, 2: 4.303, 5: 2.571, 30: 2.042}
    assert {freedom: round(student_quantile(CONFIDENCE, freedom), 3) for freedom in table} == table
    assert round(student_quantile(0.99, 4), 3) == 4.604


def busy(cores: Callable[[int], float], noise: float = 0.0, seed: int = 1) -> tuple[Fit, Fit]:
    """Fits of time and processor time of a step with quadratic work, of which a length keeps so many cores busy."""
    work = FORMS["quadratic beside a constant"]
    time = fit_points(Quantity.SECONDS, points(lambda tokens: work(tokens) / cores(tokens), noise, seed=seed))
    processor = fit_points(Quantity.PROCESSOR, points(work, noise, seed=seed + 1))
    assert time is not None
    assert processor is not None
    return time, processor


def more_and_more(tokens: int) -> float:
    return 1.0 if tokens < 1024 else 2.0 - 400 / tokens


def test_where_longer_steps_keep_more_cores_busy_the_work_is_predicted_and_shared() -> None:
    time, processor = busy(more_and_more, noise=0.01)
    truth = FORMS["quadratic beside a constant"](FAR.tokens) / more_and_more(FAR.tokens)
    assert abs(time.predict(FAR).value / truth - 1) > 0.2
    shared = time.spread_over_cores(processor).predict(FAR)
    assert shared.value == pytest.approx(truth, rel=0.15)
    assert shared.low <= truth <= shared.high


def test_as_many_cores_throughout_leave_the_fit_of_the_time_alone() -> None:
    time, processor = busy(lambda _: 1.7, noise=0.03)
    assert time.spread_over_cores(processor) is time
    fewer, cells = busy(lambda tokens: 2.0 if tokens < 1024 else 1.0)
    assert fewer.spread_over_cores(cells) is fewer
    elsewhere = fit_points(Quantity.PROCESSOR, points(FORMS["linear"], lengths=LENGTHS[1:]))
    assert elsewhere is not None
    assert time.spread_over_cores(elsewhere) is time


@pytest.mark.parametrize("cost", FORMS.values(), ids=FORMS)
def test_four_times_the_length_is_predicted_exactly_where_nothing_disturbs(cost: Callable[[int], float]) -> None:
    predicted = fit_of(points(cost)).predict(FAR)
    assert predicted.value == pytest.approx(cost(FAR.tokens), rel=1e-3)
    assert predicted.low <= cost(FAR.tokens) * 1.000001
    assert predicted.high >= cost(FAR.tokens) * 0.999999


@pytest.mark.parametrize("cost", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_the_interval_holds_the_truth_as_often_as_it_says(cost: Callable[[int], float], noise: float) -> None:
    told = [fit_of(points(cost, noise, seed=seed)).predict(FAR) for seed in range(20)]
    held = sum(one.low <= cost(FAR.tokens) <= one.high for one in told)
    assert held >= 18, f"{held} of 20"


def test_one_exponent_over_all_falls_short_of_what_has_several_parts() -> None:
    cost = FORMS["quadratic beside a constant"]
    fit = fit_of(points(cost))
    assert fit.exponent is not None
    one_power = cost(2048) * 4**fit.exponent.value
    assert one_power < 0.8 * cost(8192)
    assert fit.predict(FAR).value == pytest.approx(cost(8192), rel=1e-3)
    assert fit.form.terms == ((0, 0), (1, 0), (2, 0))


def test_a_form_with_a_part_of_less_than_nothing_is_none() -> None:
    """It would fit what falls behind at the end, and predict that more tokens cost less."""
    falling = [
        Point(size=Size(tokens=tokens, layers=1), value=v) for tokens, v in ((1, 1.0), (2, 1.9), (3, 2.7), (4, 3.4))
    ]
    fit = fit_of(falling)
    assert fit.predict(Size(tokens=40, layers=1)).value > 3.4 * 5


def test_what_the_first_tokens_are_spared_is_a_constant_below_nothing() -> None:
    """A loop over tokens: the first ones see few blocks, so that the line begins below zero."""
    fit = fit_points(Quantity.NODES, points(lambda tokens: 65.0 * tokens - 1200.0))
    assert fit is not None
    assert fit.predict(FAR).value == pytest.approx(65 * 8192 - 1200, rel=1e-6)


def test_the_exponent_is_told_with_its_interval() -> None:
    told = [fit_of(points(FORMS["a power between"], 0.02, seed=seed)).exponent for seed in range(20)]
    known = [one for one in told if one is not None]
    assert sum(one.low < 1.5 < one.high for one in known) >= 18
    assert max(one.high - one.low for one in known) < 0.15


@pytest.mark.parametrize(("name", "square"), [("quadratic", True), ("linear", False), ("a power between", False)])
def test_a_square_is_said_where_no_doubt_of_the_exponent_leaves_it_open(name: str, square: bool) -> None:
    assert fit_of(points(FORMS[name], 0.01)).is_square is square


def test_too_few_sizes_are_no_fit() -> None:
    assert fit_points(Quantity.SECONDS, points(FORMS["linear"], lengths=(256, 512))) is None
    assert fit_points(Quantity.SECONDS, points(lambda _: 0.0)) is None
    mixed = [Point(size=Size(tokens=64 * n, layers=n), value=n) for n in (1, 2)]
    assert fit_points(Quantity.NODES, mixed) is None


def production(size: Size) -> float:
    """An embedding and a head, and layers with a part that grows with the square."""
    return 0.2 + 9e-4 * size.tokens + size.layers * (0.01 + 1.5e-4 * size.tokens + 2e-8 * size.tokens**2)


def test_tokens_and_layers_together_reach_the_production_shape_from_two_layers() -> None:
    sizes = [Size(tokens=tokens, layers=layers) for tokens in (128, 256, 512, 1024) for layers in (1, 2)]
    fit = fit_of([Point(size=size, value=production(size)) for size in sizes])
    whole = Size(tokens=2048, layers=12)
    assert fit.exponent is None
    assert fit.predict(whole).value == pytest.approx(production(whole), rel=0.01)


def cell(
    tokens: int, seconds: float, *implementations: str, until: int | None = None, layers: int = 2, **changes: Any
) -> Outcome:
    cost = StepCost(
        tokens=tokens,
        layers=layers,
        batch=1,
        seconds=seconds,
        error=0.01,
        cpu_s=2 * seconds,
        cpu_error=0.01,
        steps=6,
        nodes=424,
        bytes=1000 * tokens,
        peak_bytes=None,
        implementations=implementations,
        until_tokens=until,
    )
    settings = {"model.seq_len": str(tokens), "model.shape": "ci"}
    return run(f"sweep@{tokens}", **{"settings": settings, "cost": cost, **changes})


def one_sweep(*cells: Outcome) -> Sweep:
    (sweep,) = sweeps(cells)
    return sweep


SHORT = [cell(tokens, 1e-4 * tokens, "cmp fused", "sel fused", until=1024) for tokens in (128, 256, 512)]
UNTOLD = [replace(one, cost=replace(one.cost, until_tokens=None)) for one in SHORT if one.cost]
LONG = [cell(tokens, 3e-4 * tokens, "cmp fused", "sel blockwise") for tokens in (1024, 1536, 2048)]


def test_each_implementation_has_a_fit_of_its_own() -> None:
    sweep = one_sweep(*LONG, *SHORT)
    assert [(one.implementations, one.first_tokens, one.last_tokens) for one in sweep.regimes] == [
        ("sel fused", 128, 512),
        ("sel blockwise", 1024, 2048),
    ]
    told = sweep.predict(FAR)
    assert not isinstance(told, NoPrediction)
    assert told[Quantity.SECONDS].value == pytest.approx(3e-4 * 8192)
    assert told[Quantity.BYTES].value == pytest.approx(1000 * 8192)
    assert told[Quantity.NODES].value == pytest.approx(424)


@pytest.mark.parametrize(
    ("cells", "tokens", "reason"),
    [
        (
            SHORT,
            8192,
            "the runs up to 512 tokens ran with one implementation, and from 1024 tokens another implementation"
            " runs: measure three lengths above that",
        ),
        (
            [*UNTOLD, *LONG],
            800,
            "up to 512 tokens the runs ran with sel fused, from 1024 tokens with sel blockwise, and where in between"
            " it changes is not known",
        ),
        (
            [*SHORT, LONG[-1]],
            8192,
            "1 size ran with sel blockwise, and a fit needs 3 lengths or numbers of layers",
        ),
        (LONG, 512, "the smallest run has 1024 tokens, and nothing is known below that"),
    ],
)
def test_a_prediction_across_a_change_of_implementation_is_refused_with_the_reason(
    cells: Sequence[Outcome], tokens: int, reason: str
) -> None:
    assert one_sweep(*cells).predict(Size(tokens=tokens, layers=2)) == NoPrediction(reason=reason)


def test_up_to_the_change_the_shorter_implementation_is_predicted() -> None:
    for cells in (SHORT, [*SHORT, *LONG]):
        told = one_sweep(*cells).predict(Size(tokens=1023, layers=2))
        assert not isinstance(told, NoPrediction)
        assert told[Quantity.SECONDS].value == pytest.approx(1e-4 * 1023)


def test_what_did_not_pass_or_differs_in_more_is_in_no_sweep() -> None:
    failed = cell(1024, 0.1, "cmp fused", "sel blockwise", status=Status.FAIL)
    other = cell(1024, 0.1, "cmp fused", "sel blockwise", settings={"gc.layers": "all"})
    assert sweeps([failed, other, *LONG[1:]]) == ()
    assert no_fit_reason(one_sweep(*LONG).regimes[0]) is None


def test_a_time_from_two_steps_is_no_time() -> None:
    hasty = [replace(one, cost=replace(one.cost, steps=2)) for one in LONG if one.cost]
    told = one_sweep(*hasty).predict(FAR)
    assert not isinstance(told, NoPrediction)
    assert set(told) == {Quantity.BYTES, Quantity.NODES}


def test_the_largest_run_of_a_sweep_says_that_its_time_grows_with_the_square() -> None:
    square = [cell(tokens, 1e-7 * tokens**2, "sel dense") for tokens in (256, 512, 1024, 2048)]
    told = with_growth_findings(square)
    assert [[one.code for one in run.findings] for run in told] == [[], [], [], ["quadratic_cost"]]
    assert (
        worded(told[-1].findings[0]).claim == "the time of a step grows as T^2.0 (2.0 to 2.0) from 256 to 2048 tokens"
    )
    assert with_growth_findings(told) == told
    assert with_growth_findings(LONG) == tuple(LONG)
