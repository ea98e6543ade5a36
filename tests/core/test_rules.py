"""Every rule that is written is asked once, in the order in which RULES shows it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

from nsa_harness import subject
from nsa_harness.core.diagnosis import rules as families
from nsa_harness.core.diagnosis.explanation import Rule
from nsa_harness.core.diagnosis.rules import CAUSES, NOTED, RULES, RulePhase
from nsa_harness.subject.tables import RULES as OWN_RULES

OF_ANY_PROGRAM = tuple(rule for rules in RULES.values() for rule in rules)


def written() -> Iterator[Rule]:
    """The public functions that return an explanation, of the families and of what is known of our own program."""
    for found in (
        found for place in (families, subject) for found in pkgutil.iter_modules(place.__path__, f"{place.__name__}.")
    ):
        module = importlib.import_module(found.name)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            answers = inspect.signature(function).return_annotation in ("Explanation", "Explanation | None")
            if answers and not name.startswith("_") and function.__module__ == module.__name__:
                yield function


def test_every_rule_that_is_written_is_asked_once() -> None:
    every = (*OF_ANY_PROGRAM, *OWN_RULES)
    assert sorted(rule.__name__ for rule in written()) == sorted(rule.__name__ for rule in every)
    assert len({rule.__name__ for rule in every}) == len(every)


def test_the_rules_of_the_core_need_none_of_one_programs_own() -> None:
    assert {rule.__module__.rpartition(".")[0] for rule in OF_ANY_PROGRAM} == {families.__name__}
    assert {rule.__module__.rpartition(".")[0] for rule in OWN_RULES} == {subject.__name__}


def test_each_phase_has_its_rules_and_what_is_noted_comes_after_the_cause() -> None:
    assert list(RULES) == list(RulePhase) == [*CAUSES, *NOTED]
    assert RULES[RulePhase.PROGRAM] == (), "those of a program are passed in"
    assert RULES[RulePhase.FALLBACK][-1].__name__ == "unknown", "it answers for every run"
