"""Which scenarios a command line means."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from nsa_harness.core.scenario.selection import Selection, select_items
from nsa_harness.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Item:
    name: str
    family: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    priority: int = 0


ITEMS = (
    Item(name="gc_all@gc.mode=reentrant", family="gc_all", tags=("plan", "gc")),
    Item(name="gc_all@gc.mode=non_reentrant", family="gc_all", tags=("plan", "gc")),
    Item(name="ddp_gloo", family="ddp_gloo", aliases=("ddp_gloo_sanity",), tags=("plan", "ddp")),
    Item(name="ddp_onestep", family="ddp_onestep", tags=("plan", "ddp"), priority=10),
    Item(name="fault_raise", family="fault_raise", tags=("fault",)),
)


def names(*patterns: str, tags: tuple[str, ...] = (), expression: str | None = None) -> list[str]:
    chosen = select_items(ITEMS, Selection(patterns=patterns, tags=tags, expression=expression))
    return [item.name for item in chosen]


def test_a_name_selects_every_variant_in_its_order_and_a_variants_name_selects_it_alone() -> None:
    assert names("gc_all") == ["gc_all@gc.mode=reentrant", "gc_all@gc.mode=non_reentrant"]
    assert names("gc_all@gc.mode=reentrant") == ["gc_all@gc.mode=reentrant"]


def test_an_alias_and_a_glob_select() -> None:
    assert names("ddp_gloo_sanity") == ["ddp_gloo"]
    assert names("ddp_*") == ["ddp_onestep", "ddp_gloo"]


def test_patterns_keep_their_order_and_select_nothing_twice() -> None:
    assert names("fault_raise", "ddp_*", "ddp_gloo") == ["fault_raise", "ddp_onestep", "ddp_gloo"]


def test_priority_goes_first_among_tagged_ones() -> None:
    assert names(tags=("plan",))[0] == "ddp_onestep"
    assert names(tags=("fault", "ddp")) == ["ddp_onestep", "ddp_gloo", "fault_raise"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("ddp and not gloo", ["ddp_onestep"]),
        ("fault or (ddp and gloo)", ["ddp_gloo", "fault_raise"]),
        ("not not onestep", ["ddp_onestep"]),
        ("sanity", ["ddp_gloo"]),
        ("reentrant and not non_reentrant", ["gc_all@gc.mode=reentrant"]),
    ],
)
def test_an_expression_selects_by_parts_of_names_and_whole_tags(expression: str, expected: list[str]) -> None:
    assert names(expression=expression) == expected


def test_a_name_goes_before_an_alias() -> None:
    user = Item(name="ddp_gloo_sanity", family="ddp_gloo_sanity")
    chosen = select_items((*ITEMS, user), Selection(patterns=("ddp_gloo_sanity",)))
    assert chosen == (user,)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(patterns=("ddp_onestp",)), 'no scenario named "ddp_onestp"; did you mean "ddp_onestep"?'),
        (Selection(patterns=("zzz",)), 'no scenario named "zzz"; `nsa-harness list` shows all scenarios'),
        (Selection(tags=("plann",)), 'no scenario has the tag "plann"; did you mean "plan"?'),
        (Selection(tags=("q",)), 'no scenario has the tag "q"; known tags: ddp, fault, gc, plan'),
        (
            Selection(patterns=("ddp_*",), tags=("fault",), expression="gloo"),
            'nothing selected: none of 5 scenarios matches ddp_* -t fault -k "gloo"',
        ),
        (
            Selection(expression="ddp and"),
            '-k "ddp and": expected a word at the end; combine words with and, or, not and parentheses',
        ),
        (
            Selection(expression="(ddp"),
            '-k "(ddp": expected ")"; combine words with and, or, not and parentheses',
        ),
        (
            Selection(expression="ddp gloo"),
            '-k "ddp gloo": did not expect "gloo"; combine words with and, or, not and parentheses',
        ),
        (
            Selection(expression="or"),
            '-k "or": expected a word, got "or"; combine words with and, or, not and parentheses',
        ),
    ],
)
def test_what_selects_nothing_is_an_error_that_says_why(selection: Selection, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        select_items(ITEMS, selection)
    assert str(caught.value) == message
