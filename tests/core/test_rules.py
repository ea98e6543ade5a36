"""Every rule that is written is asked, in its phase, and precedence is declared once."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from graphlib import CycleError

import pytest

from nsa_harness import subject
from nsa_harness.core.diagnosis import rules as families
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.context import Case
from nsa_harness.core.diagnosis.engine import RULES, by_phase
from nsa_harness.core.diagnosis.phases import Rule, RulePhase, in_order, rule
from nsa_harness.subject.tables import RULES as OWN_RULES


def written() -> Iterator[Rule]:
    """The rules of every module of the diagnosis and of what is known of our own program.

    A public function of a rules' module that could be one is one.
    """
    for found in (
        found for place in (families, subject) for found in pkgutil.iter_modules(place.__path__, f"{place.__name__}.")
    ):
        module = importlib.import_module(found.name)
        own = [
            one for one in vars(module).values() if isinstance(one, Rule) and one.explain.__module__ == module.__name__
        ]
        for name, function in inspect.getmembers(module, inspect.isfunction) if own else ():
            answers = inspect.signature(function).return_annotation == "Explanation | None"
            takes = [one.annotation for one in inspect.signature(function).parameters.values()] == ["Case"]
            assert name.startswith("_") or not (takes and answers), f"{name} of {found.name} needs @rule"
        yield from own


def test_every_rule_that_is_written_is_asked_once() -> None:
    every = (*RULES, *OWN_RULES)
    assert sorted(one.name for one in written()) == sorted(one.name for one in every)
    assert len({one.name for one in every}) == len(every)
    for rules in (RULES, every):
        asked = [one for in_phase in by_phase(rules).values() for one in in_phase]
        assert len(asked) == len(rules)
        assert set(asked) == set(rules)


def test_the_rules_of_the_core_need_none_of_one_programs_own() -> None:
    assert {one.explain.__module__.rpartition(".")[0] for one in RULES} == {families.__name__}
    assert {one.explain.__module__.rpartition(".")[0] for one in OWN_RULES} == {subject.__name__}


def named_rule(name: str, *outranks: str, outranked_by: tuple[str, ...] = ()) -> Rule:
    def explain(_: Case) -> None:
        return None

    explain.__name__ = name
    return rule(RulePhase.SLOW, Cause.SLOW, outranks=outranks, outranked_by=outranked_by)(explain)


def test_a_rule_is_asked_before_those_that_it_outranks_wherever_it_stands() -> None:
    rules = [named_rule("last"), named_rule("middle", "last"), named_rule("first", "middle")]
    assert [one.name for one in in_order(rules)] == ["first", "middle", "last"]
    below = named_rule("below", "last", outranked_by=("first",))
    assert [one.name for one in in_order([below, *rules[:1], named_rule("first", "last")])] == [
        "first",
        "below",
        "last",
    ]
    with pytest.raises(CycleError):
        in_order([named_rule("one", "other"), named_rule("other", "one")])
    with pytest.raises(KeyError):
        in_order([named_rule("one", "nobody")])
