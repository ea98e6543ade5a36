"""Every rule that is written is also asked, once, and first those that say most."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator

from harness.core import diagnosed
from harness.core.diagnosed.rules import BESIDES, CAUSES


def written() -> Iterator[Callable[..., object]]:
    """The public functions of the rules' modules that go from a case alone to a finding or nothing."""
    for module in pkgutil.iter_modules(diagnosed.__path__):
        if module.name.startswith("of_"):
            rules = importlib.import_module(f"{diagnosed.__name__}.{module.name}")
            for name, found in inspect.getmembers(rules, inspect.isfunction):
                signature = inspect.signature(found)
                of_a_case = [one.annotation for one in signature.parameters.values()] == ["Case"]
                if found.__module__ == rules.__name__ and not name.startswith("_") and of_a_case:
                    assert signature.return_annotation == "Explanation | None", name
                    yield found


def test_every_rule_that_is_written_is_asked_once() -> None:
    asked = [*CAUSES, *BESIDES]
    assert len(set(asked)) == len(asked)
    left = [rule.__name__ for rule in written() if rule not in asked]
    assert left == ["never_a_gradient"], "the one that another rule asks"
