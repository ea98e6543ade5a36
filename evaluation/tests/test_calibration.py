"""What is claimed of the confidence of a search is what the committed simulation shows."""

from __future__ import annotations

import pytest

from evaluation import calibration, claims
from evaluation.experiments import PAGES
from evaluation.scoring import chance_of_as_many

RESULTS = calibration.results_of(calibration.EXPERIMENT.cells())


def test_each_shape_and_noise_was_searched_and_nothing_refutes_the_confidence() -> None:
    assert {*calibration.cells()} == {*RESULTS}
    assert all(one.searches == calibration.SEARCHES for one in RESULTS.values())
    assert calibration.refuted(calibration.chances_of(RESULTS)) == []


def test_rates_that_lie_apart_are_answered_but_for_a_number_of_many_that_fails_half_the_time() -> None:
    seldom = {
        str(cell): one.answered for cell, one in RESULTS.items() if cell.apart and one.answered < calibration.ANSWERED
    }
    # A thousand probes are too few for some of them.
    assert set(seldom) == {"count/0.5-0/96", "count/0.5-0.05/96", "count/0.5-0.1/96"}
    assert min(seldom.values()) > 0.8


def test_the_page_is_that_of_the_results() -> None:
    told = (PAGES / "calibration.md").read_text(encoding="utf-8")
    assert told.startswith("\n".join(calibration.lines(RESULTS)))
    assert (PAGES / "calibration.svg").read_text(encoding="utf-8") == calibration.picture(RESULTS)


def test_the_table_of_claims_is_what_they_conclude_today() -> None:
    told = (PAGES / "calibration.md").read_text(encoding="utf-8")
    assert told.endswith("\n".join([*claims.lines(), ""]))


def test_of_what_is_called_certain_in_bursts_little_is_wrong() -> None:
    bursts = [one for cell, one in RESULTS.items() if cell.trouble is calibration.Trouble.BURSTS]
    assert {one.version for one in bursts} == {calibration.VERSION}
    certain, wrong = (sum(getattr(one, name) for one in bursts) for name in ("certain", "certain_wrong"))
    assert certain > 1000
    assert wrong <= 0.01 * certain


def test_of_what_is_called_certain_beside_other_failures_next_to_nothing_is_wrong() -> None:
    troubled = [one for cell, one in RESULTS.items() if cell.trouble not in (None, calibration.Trouble.BURSTS)]
    certain, wrong = (sum(getattr(one, name) for one in troubled) for name in ("certain", "certain_wrong"))
    assert certain > 1000
    assert wrong <= 0.01 * certain


@pytest.mark.parametrize("name", ["single/1-0/12", "threshold/0.8-0/8", "pair/1-0.1/8"])
def test_a_cell_searched_again_is_as_it_was(name: str) -> None:
    cell = next(cell for cell in calibration.cells() if str(cell) == name)
    assert calibration.result_of(cell) == RESULTS[cell]


def test_a_confidence_that_does_not_hold_is_seen() -> None:
    """Thirty wrong of two hundred, where ten are allowed; among cells that hold."""
    held = {f"cell {place}": chance_of_as_many(10, 200, 0.05) for place in range(500)}
    assert calibration.refuted(held) == []
    assert calibration.refuted({**held, "broken": chance_of_as_many(30, 200, 0.05)}) == ["broken"]
