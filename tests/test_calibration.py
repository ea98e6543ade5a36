"""What is claimed of the confidence of a search is what the committed simulation shows."""

from __future__ import annotations

import pytest

from tools import calibration

RESULTS = calibration.stored_results()


def test_of_each_shape_and_noise_all_was_searched_up_to_48_items_and_nowhere_the_confidence_is_refuted() -> None:
    assert {cell for cell in calibration.cells() if cell.items <= 48} <= {*RESULTS}
    assert all(one.searches == calibration.SEARCHES for one in RESULTS.values())
    assert calibration.refuted(calibration.chances_of(RESULTS)) == []


def test_rates_that_lie_apart_are_answered() -> None:
    assert [str(cell) for cell, one in RESULTS.items() if cell.apart and one.answered < calibration.ANSWERED] == []


def test_the_page_is_that_of_the_results() -> None:
    told = calibration.PAGE.read_text(encoding="utf-8")
    assert told.startswith("\n".join(calibration.lines(RESULTS)))
    assert calibration.PICTURE.read_text(encoding="utf-8") == calibration.picture(RESULTS)


@pytest.mark.parametrize("name", ["single/1-0/12", "threshold/0.8-0/8", "pair/1-0.1/8"])
def test_a_cell_searched_again_is_as_it_was(name: str) -> None:
    cell = next(cell for cell in calibration.cells() if str(cell) == name)
    assert calibration.result_of(cell) == RESULTS[cell]


def test_a_confidence_that_does_not_hold_is_seen() -> None:
    """Thirty wrong of two hundred, where ten are allowed; among cells that hold."""
    held = {f"cell {place}": calibration.chance_of_as_many(10, 200) for place in range(500)}
    assert calibration.refuted(held) == []
    assert calibration.refuted({**held, "broken": calibration.chance_of_as_many(30, 200)}) == ["broken"]
