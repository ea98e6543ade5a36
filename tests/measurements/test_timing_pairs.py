"""What a command costs under nsa-harness: medians of pairs, and an honest word about noise."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.timing_pairs import Overhead, TimedPair, number_of_pairs


def pairs(*times: tuple[float, float]) -> tuple[TimedPair, ...]:
    return tuple(TimedPair(bare_s=bare_s, harness_s=harness_s, after_s=0.25) for bare_s, harness_s in times)


CERTAIN = Overhead(command="python train.py", pairs=pairs((4.0, 4.4), (5.0, 5.5), (4.2, 4.5)))


def test_medians_the_difference_and_the_spread_are_told() -> None:
    assert list(CERTAIN.lines()) == [
        "overhead of the harness, 3 pairs, in turn: python train.py",
        "  bare              4.200 s   (4.000 to 5.000)",
        "  with harness      4.500 s   (4.400 to 5.500)",
        "  difference       +0.300 s   (+0.300 to +0.500)   +7.1 %",
        "  of which          0.250 s   after the command's end: evidence, verdict, report",
    ]


def test_pairs_that_disagree_are_noise_and_it_is_said() -> None:
    noisy = replace(CERTAIN, pairs=pairs((4.0, 4.4), (5.0, 4.9), (4.2, 4.5)))
    assert list(noisy.lines())[-1].startswith("  within the noise")
    assert noisy.values()["within_noise"] is True


def test_a_harness_that_is_faster_in_every_pair_is_no_noise_either() -> None:
    faster = replace(CERTAIN, pairs=pairs((4.0, 3.9), (5.0, 4.9)))
    assert faster.is_certain
    assert faster.more_percent < 0


def test_the_json_has_every_sample() -> None:
    values = json.loads(json.dumps(CERTAIN.values()))
    assert [pair["bare_s"] for pair in values["pairs"]] == [4.0, 5.0, 4.2]
    assert (values["bare_s_median"], values["harness_s_median"], values["within_noise"]) == (4.2, 4.5, False)
    assert values["more_percent"] == pytest.approx(100 * 0.3 / 4.2)


@pytest.mark.parametrize(("first_s", "wanted"), [(0.0, 7), (1.0, 7), (12.0, 5), (20.0, 3), (600.0, 3)])
def test_a_long_command_is_run_less_often_but_never_less_than_three_times(first_s: float, wanted: int) -> None:
    assert number_of_pairs(first_s) == wanted
