"""The rate of each step, the loss on what is held out, and what else is set around a step."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import Alone
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from nsa_attention.data import Batch, Batches
from nsa_attention.evaluation import Evaluation
from nsa_attention.options import SettingsError
from nsa_attention.schedule import learning_rate
from nsa_attention.settings import Settings, read_settings
from nsa_attention.values import Decay
from nsa_attention.world import World

ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend=None)


def read(*arguments: str) -> Settings:
    return read_settings(arguments, {})


def mistakes(*arguments: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read(*arguments)
    return str(caught.value).splitlines()


def test_without_a_schedule_every_step_has_the_same_rate() -> None:
    assert {learning_rate(read("--learning-rate", "0.3"), step) for step in (1, 2, 10_000)} == {0.3}


def test_a_warm_up_and_a_cosine_are_those_of_the_formula() -> None:
    words = "--learning-rate 1 --warmup-steps 4 --lr-decay cosine --decay-steps 12 --min-lr 0.2"
    rates = [learning_rate(read(*words.split()), step) for step in range(1, 15)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.6)  # half of the way down
    assert rates[11:] == pytest.approx([0.2, 0.2, 0.2])


def test_a_line_falls_as_much_in_each_step() -> None:
    words = "--learning-rate 1 --lr-decay linear --decay-steps 4"
    assert [learning_rate(read(*words.split()), step) for step in range(1, 6)] == [0.75, 0.5, 0.25, 0.0, 0.0]


@how(deadline=None)  # a machine that does much else
@given(st.integers(0, 50), st.integers(1, 200), st.floats(1e-6, 10), st.floats(0, 1), st.sampled_from(list(Decay)))
def test_the_rate_rises_to_the_highest_and_never_again(
    warmup: int, after: int, highest: float, share: float, decay: Decay
) -> None:
    settings = replace(
        read(),
        learning_rate=highest,
        warmup_steps=warmup,
        lr_decay=decay,
        decay_steps=warmup + after,
        min_lr=highest * share,
    )
    rates = [learning_rate(settings, step) for step in range(1, warmup + after + 10)]
    rise, fall = rates[:warmup], rates[warmup:]
    assert rise == sorted(rise)
    assert all(0 < rate <= highest for rate in rise)
    assert all(one >= two - 1e-12 * highest for one, two in pairwise(fall))
    assert all(highest * (share - 1e-12) <= rate <= highest * (1 + 1e-12) for rate in fall)
    assert fall[-1] == pytest.approx(highest if decay is Decay.NONE else highest * share)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr-decay cosine", "--lr-decay: cosine needs --decay-steps greater than --warmup-steps (0), got 0"),
        (
            "--lr-decay linear --warmup-steps 9 --decay-steps 9",
            "--lr-decay: linear needs --decay-steps greater than --warmup-steps (9), got 9",
        ),
        ("--decay-steps 9", "--decay-steps: 9 has no effect without a decay; add --lr-decay cosine"),
        ("--min-lr 0.1", "--min-lr: 0.1 has no effect without a decay; add --lr-decay cosine"),
        (
            "--lr-decay cosine --decay-steps 9 --min-lr 1",
            "--min-lr: expected at most --learning-rate (0.001), got 1",
        ),
        ("--beta2 1", '--beta2: expected a number of at least 0 and below 1, got "1"'),
        ("--clip -1", '--clip: expected a number of at least 0, got "-1"'),
        ("--weight-decay x", '--weight-decay: expected a number of at least 0, got "x"'),
        ("--eval-data text", "--eval-data: text has no effect without evaluations; add --eval-every"),
        ("--eval-every 2 --phase data", "--eval-every: --phase data has no model; use --phase step"),
        (
            "--eval-every 2 --data text",
            "--eval-every: --data text has no held-out part; add --eval-data",
        ),
    ],
)
def test_what_makes_no_sense_is_said(words: str, message: str) -> None:
    assert mistakes(*words.split()) == [message]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_that_goes_on_has_the_rates_and_the_losses_of_one_that_was_not_interrupted(
    alone: Alone, tmp_path: Path
) -> None:
    words = (
        "--layers 1 --warmup-steps 2 --lr-decay cosine --decay-steps 4 --beta2 0.9 --weight-decay 0.1 --eval-every 2"
    )
    common = words.split()
    assert alone(*common, "--steps", "4", "--out-dir", "whole")[0] == 0
    assert alone(*common, "--steps", "2", "--checkpoint-every", "2")[0] == 0
    assert alone(*common, "--steps", "4", "--resume", "out")[0] == 0
    whole, parts = (table(tmp_path / name / "training.csv") for name in ("whole", "out"))
    assert [row["learning_rate"] for row in whole] == ["0.0005", "0.001", "0.0005", "0"]
    told = ("step", "loss", "grad_norm", "learning_rate")
    assert [[row[key] for key in told] for row in parts] == [[row[key] for key in told] for row in whole]
    held = [
        [(row["step"], row["loss"]) for row in table(tmp_path / name / "evaluation.csv")] for name in ("whole", "out")
    ]
    assert held[0] == held[1]
    assert [step for step, _ in held[0]] == ["2", "4"]


def test_an_evaluation_changes_nothing_of_the_training(alone: Alone, tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_bytes(bytes(range(256)) * 8)
    common = ("--layers", "1", "--steps", "3", "--data", "text", "--gc", "all")
    assert alone(*common, "--out-dir", "plain")[0] == 0
    status, output, _ = alone(*common, "--eval-every", "1", "--eval-data", "held_out.txt", "--eval-batches", "2")
    assert status == 0
    losses = [[row["loss"] for row in table(tmp_path / name / "training.csv")] for name in ("plain", "out")]
    assert losses[0] == losses[1]
    assert len([line for line in output.splitlines() if line.startswith("evaluation step ")]) == 3


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp1"])
def test_a_wrapped_model_is_evaluated_and_trains_on_like_a_bare_one(alone: Alone, tmp_path: Path, wrapper: str) -> None:
    told = []
    for name in ("none", wrapper):
        words = (
            "--layers",
            "1",
            "--steps",
            "2",
            "--eval-every",
            "1",
            "--gc",
            "all",
            "--wrapper",
            name,
            "--out-dir",
            name,
        )
        status, _, error = alone(*words)
        assert status == 0, error
        losses = [table(tmp_path / name / file) for file in ("training.csv", "evaluation.csv")]
        told.append([float(row["loss"]) for rows in losses for row in rows])
    assert told[1] == pytest.approx(told[0], rel=1e-5)
    assert len(told[0]) == 4


def test_the_loss_of_an_evaluation_is_the_mean_over_the_batches_that_no_step_has(tmp_path: Path) -> None:
    settings = replace(read("--eval-every", "5", "--eval-batches", "3", "--batch", "2"), out_dir=tmp_path)
    model, seen = torch.nn.Linear(1, 1), []

    def loss_of(batch: Batch) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        assert not model.training
        seen.append(batch.tokens)
        return batch.tokens.double().sum()

    evaluation = Evaluation(settings, ALONE, model, loss_of)
    evaluation.evaluate(5)
    evaluation.evaluate(10)
    assert model.training
    assert all(torch.equal(one, two) for one, two in zip(seen[:3], seen[3:], strict=True))
    batches = Batches(settings, ALONE)
    trained = [batches.fetch().tokens for _ in range(20)]
    assert not any(torch.equal(held, one) for held in seen for one in trained)
    rows = table(tmp_path / "evaluation.csv")
    mean = torch.stack(seen[:3]).double().mean()
    assert [(row["step"], float(row["loss"])) for row in rows] == [
        (step, pytest.approx(float(mean), rel=1e-5)) for step in ("5", "10")
    ]
    assert {row["tokens"] for row in rows} == {str(3 * 2 * settings.model.seq_len)}


def test_an_evaluation_whose_loss_fails_leaves_the_model_in_training(tmp_path: Path) -> None:
    settings = replace(read("--eval-every", "1"), out_dir=tmp_path)
    model = torch.nn.Linear(1, 1)

    def fails(_: Batch) -> torch.Tensor:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        Evaluation(settings, ALONE, model, fails).evaluate(1)
    assert model.training
    assert not (tmp_path / "evaluation.csv").exists()


def test_only_every_so_many_steps_are_printed_and_all_are_kept(alone: Alone, tmp_path: Path) -> None:
    status, output, _ = alone("--layers", "1", "--steps", "5", "--log-every", "3")
    assert status == 0
    assert [line.split()[1] for line in output.splitlines() if line.startswith("step ")] == ["1", "3"]
    assert len(table(tmp_path / "out" / "training.csv")) == 5


def test_a_limit_of_0_is_one_that_no_gradient_reaches(alone: Alone, tmp_path: Path) -> None:
    told = []
    for clip in ("0", "1e9"):
        assert alone("--layers", "1", "--steps", "3", "--clip", clip, "--out-dir", f"clip{clip}")[0] == 0
        told.append([(row["loss"], row["grad_norm"]) for row in table(tmp_path / f"clip{clip}" / "training.csv")])
    assert told[0] == told[1]
    assert all(float(norm) > 0 for _, norm in told[0])
