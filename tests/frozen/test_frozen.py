"""Moves and renames change no judgement: evidence that tests built by hand is judged as on the day of the freeze.

A change that means to judge otherwise writes the judgements anew (`python tests/frozen/freeze.py judgements`), and its
review reads the difference.
"""

from __future__ import annotations

from itertools import zip_longest

from facts_and_sentences import joined, split
from freeze import FACTS, SENTENCES, frozen_judgements, judgements


def test_every_frozen_evidence_is_judged_as_it_was() -> None:
    now, frozen = judgements(), frozen_judgements()
    changed = {number: (was, one) for number, (was, one) in enumerate(zip_longest(frozen, now), 1) if was != one}
    assert changed == {}
    facts, sentences = split(now)
    assert facts == FACTS.read_text(encoding="utf-8").splitlines()
    assert sentences == SENTENCES.read_text(encoding="utf-8").splitlines()
    assert joined(facts, sentences) == now, "facts and sentences together are the whole judgement"
