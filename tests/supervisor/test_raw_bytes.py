"""Paths and arguments that are not UTF-8, on their way into values and back to the system."""

from __future__ import annotations

import json
import os

from attempts import spec
from hypothesis import given
from hypothesis import strategies as st

from nsa_harness.core.raw_bytes import readable_json, with_raw_bytes
from nsa_harness.core.redaction import shell_words
from nsa_harness.core.scenario.checks import check_scenario
from nsa_harness.core.scenario.yaml_tree import Origin, from_plain
from nsa_harness.render.text import escape
from nsa_harness.subject.program import PROGRAM
from nsa_harness.supervisor.launch.launcher import command_line
from nsa_harness.supervisor.storage.adapters import json_text, type_adapter

LATIN_1 = os.fsdecode("café/train.py".encode("latin-1"))


def test_a_latin_1_argument_reaches_the_program_as_it_was_typed() -> None:
    tree = from_plain({"name": "x", "run": {"program": LATIN_1, "args": [LATIN_1, "ü"]}}, Origin(source="test"))
    scenario = check_scenario(tree, PROGRAM).scenario
    assert scenario is not None
    launched = spec(program=(scenario.run.program, *scenario.run.args))
    stored = type_adapter(type(launched)).validate_json(json_text(launched).encode(), strict=True)
    words = [os.fsencode(with_raw_bytes(word)) for word in command_line(stored, "python", None)]
    assert words[-3:] == [b"caf\xe9/train.py", b"caf\xe9/train.py", "ü".encode()]


def test_a_spec_with_half_a_surrogate_pair_is_read() -> None:
    """An earlier version stored such a spec, and then could not read it."""
    old = spec(program=(LATIN_1,))
    assert type_adapter(type(old)).validate_json(json_text(old), strict=True).program != ()


def test_the_byte_is_shown_and_typed_as_one() -> None:
    kept = json.loads(readable_json(json.dumps(LATIN_1)))
    assert escape(kept) == "caf\\udce9/train.py"
    assert shell_words([kept]) == r"$'caf\351/train.py'"


@given(st.text(st.characters(categories=("Cs", "L", "So", "P"))))
def test_only_bytes_are_changed_and_all_of_them_come_back(text: str) -> None:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "ignore") + LATIN_1  # no half pair but the byte
    kept = json.loads(readable_json(json.dumps(text)))
    assert with_raw_bytes(kept) == text
    kept.encode()
