"""Every rule that is written is asked, in its phase, and precedence is declared once."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from graphlib import CycleError

import pytest

from nsa_harness.core.diagnosis import rules as families
from nsa_harness.core.diagnosis.case import Case
from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.engine import IN_PHASE, RULES
from nsa_harness.core.diagnosis.phases import Rule, RulePhase, in_order, rule


def written() -> Iterator[Rule]:
    """The rules of every module of the diagnosis. A public function of a rules' module that could be one is one."""
    for found in pkgutil.iter_modules(families.__path__):
        module = importlib.import_module(f"{families.__name__}.{found.name}")
        own = [
            one for one in vars(module).values() if isinstance(one, Rule) and one.explain.__module__ == module.__name__
        ]
        for name, function in inspect.getmembers(module, inspect.isfunction) if own else ():
            answers = inspect.signature(function).return_annotation == "Explanation | None"
            takes = [one.annotation for one in inspect.signature(function).parameters.values()] == ["Case"]
            assert name.startswith("_") or not (takes and answers), f"{name} of {found.name} needs @rule"
        yield from own


def test_every_rule_that_is_written_is_asked_once() -> None:
    assert sorted(one.name for one in written()) == sorted(one.name for one in RULES)
    assert len({one.name for one in RULES}) == len(RULES)
    assert [one for rules in IN_PHASE.values() for one in rules if one not in RULES] == []
    assert {one for rules in IN_PHASE.values() for one in rules} == set(RULES)


def named_rule(name: str, *outranks: str) -> Rule:
    def explain(_: Case) -> None:
        return None

    explain.__name__ = name
    return rule(RulePhase.SLOW, Cause.SLOW, outranks=outranks)(explain)


def test_a_rule_is_asked_before_those_that_it_outranks_wherever_it_stands() -> None:
    rules = [named_rule("last"), named_rule("middle", "last"), named_rule("first", "middle")]
    assert [one.name for one in in_order(rules)] == ["first", "middle", "last"]
    with pytest.raises(CycleError):
        in_order([named_rule("one", "other"), named_rule("other", "one")])
    with pytest.raises(KeyError):
        in_order([named_rule("one", "nobody")])
