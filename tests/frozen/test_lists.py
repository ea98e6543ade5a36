"""Moves and renames change no order of rules, no search, no hash of a scenario and no help.

A change that means to do so writes the list anew (`python tests/frozen/freeze.py NAME`), and its review reads the
difference.
"""

from __future__ import annotations

import pytest
from frozen_lists import LISTS


@pytest.mark.parametrize("name", LISTS)
def test_a_frozen_list_is_as_it_was(name: str) -> None:
    path, text = LISTS[name]
    assert text().splitlines() == path.read_text(encoding="utf-8").splitlines()
