"""Whether an observed job ended because somebody asked it to."""

from __future__ import annotations

import pytest

from nsa_harness.supervisor.observe.observe import ended_as_asked

S = 10**9


@pytest.mark.parametrize(("status", "after_s", "asked"), [(-15, 1, True), (1, 60, True), (1, 61, False), (0, 1, False)])
def test_a_bad_end_within_a_minute_of_the_signal_is_what_was_asked_for(status: int, after_s: int, asked: bool) -> None:
    assert ended_as_asked(status, 100 * S, (100 + after_s) * S) is asked
