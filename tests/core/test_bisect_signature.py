"""Which failure counts, and when two are the same."""

from __future__ import annotations

import pytest

from nsa_harness.core.experiment.trial import (
    SoughtFailure,
    counts_as,
    failure_signature,
    file_and_line,
    is_same_failure,
    parse_outcome,
)
from nsa_harness.core.report import Culprit, Place, Status
from nsa_harness.core.search.question import ProbeResult
from tests.core.runs import run


def _at(line: int | None, status: Status = Status.HANG, cause: str = "lock_cycle"):
    place = None if line is None else Place(file="/job/model.py", line=line)
    return run("p01", status, cause=cause, culprit=Culprit(ranks=(1,), step=1, collective=None, place=place))


def test_the_first_failure_shows_what_is_sought_and_another_line_is_another_failure():
    sought = failure_signature(_at(40))
    assert counts_as(_at(40), SoughtFailure(), None) is ProbeResult.BAD
    assert counts_as(_at(40), SoughtFailure(), sought) is ProbeResult.BAD
    assert counts_as(_at(41), SoughtFailure(), sought) is ProbeResult.DIFFERENT
    assert counts_as(_at(40, Status.FAIL), SoughtFailure(), sought) is ProbeResult.DIFFERENT


def test_a_line_is_the_same_in_another_checkout_of_the_file():
    here, there = Place(file="/job/train.py", line=4), Place(file="reports/trees/ab12/train.py", line=4)
    assert file_and_line(here) == file_and_line(there) == "train.py:4"
    assert file_and_line(None) is None


def test_where_no_line_is_known_the_cause_decides():
    assert is_same_failure(failure_signature(_at(None)), failure_signature(_at(40)))
    assert not is_same_failure(failure_signature(_at(None, cause="blocked_io")), failure_signature(_at(40)))


def test_what_passed_is_good_and_what_was_not_judged_is_neither():
    assert counts_as(_at(None, Status.PASS), SoughtFailure(), None) is ProbeResult.GOOD
    assert counts_as(_at(None, Status.SKIP), SoughtFailure(), None) is ProbeResult.UNRESOLVED
    assert counts_as(_at(None, Status.ERROR), SoughtFailure(), None) is ProbeResult.UNRESOLVED


def test_an_outcome_can_be_asked_for_by_its_kind_or_by_a_text_of_its_output():
    assert counts_as(_at(40, Status.FAIL), parse_outcome("hang"), None) is ProbeResult.DIFFERENT
    assert counts_as(_at(41), parse_outcome("hang"), failure_signature(_at(40))) is ProbeResult.BAD
    assert counts_as(_at(1, Status.FAIL), parse_outcome("fail:CUDA|nan"), None, "loss is nan") is ProbeResult.BAD
    assert counts_as(_at(1, Status.FAIL), parse_outcome("fail:CUDA"), None, "loss is nan") is ProbeResult.DIFFERENT
    assert counts_as(_at(1, Status.FAIL), parse_outcome("any"), failure_signature(_at(40))) is ProbeResult.BAD


def _rated(step_s: float | None, slow_from_s: float | None, status: Status = Status.PASS) -> ProbeResult:
    return counts_as(_at(None, status), parse_outcome("slow"), None, step_s=step_s, slow_from_s=slow_from_s)


def test_what_passes_slowly_is_bad_where_that_is_asked():
    assert _rated(0.2, None) is ProbeResult.GOOD  # the good end itself, which says what is slow
    assert _rated(0.19, 0.2) is ProbeResult.GOOD
    assert _rated(0.2, 0.2) is ProbeResult.BAD
    assert _rated(None, 0.2) is ProbeResult.UNRESOLVED
    assert _rated(0.3, 0.2, Status.HANG) is ProbeResult.DIFFERENT
    assert _rated(None, 0.2, Status.SKIP) is ProbeResult.UNRESOLVED


def test_slow_begins_where_runs_of_the_good_end_do_not_reach():
    auto = parse_outcome("slow")
    assert auto.slow_from_s([]) is None
    assert auto.slow_from_s([0.1, 0.1, 0.1]) == pytest.approx(0.125)
    assert auto.slow_from_s([0.1, 0.15, 0.1]) == pytest.approx(0.225)  # as much above them as they lie apart
    assert parse_outcome("slow:2").slow_from_s([0.1, 0.3, 0.1]) == pytest.approx(0.2)
    assert parse_outcome("slow:50ms").slow_from_s([]) == parse_outcome("slow:0.05s").slow_from_s([0.1]) == 0.05
    assert parse_outcome("hang").slow_from_s([0.1]) is None


@pytest.mark.parametrize("text", ["slow:1", "slow:x", "slow:0s", "slow:-2", "slow:2m"])
def test_a_slowness_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"slow: expected 1\.5"):
        parse_outcome(text)


@pytest.mark.parametrize("text", ["hung", "fail:(", "hang:x", ""])
def test_an_outcome_that_is_none_is_refused_with_the_reason(text):
    with pytest.raises(ValueError, match=r"expected same|is not a regular expression"):
        parse_outcome(text)
