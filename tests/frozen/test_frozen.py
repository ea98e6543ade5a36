"""Moves and renames change no judgement: evidence that tests built by hand is judged as on the day of the freeze.

A change that means to judge otherwise writes the judgements anew (`python tests/frozen/freeze.py`), and its review
reads the difference.
"""

from __future__ import annotations

import json
from itertools import zip_longest

from freeze import JUDGEMENTS, judgements


def test_every_frozen_evidence_is_judged_as_it_was() -> None:
    frozen = JUDGEMENTS.read_text(encoding="utf-8").splitlines()
    changed = {
        number: (json.loads(was or "null"), json.loads(now or "null"))
        for number, (was, now) in enumerate(zip_longest(frozen, judgements()), 1)
        if was != now
    }
    assert changed == {}
