"""The smallest edits between two ways of going on: found as by trying all of them, and told apart where they can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep import line

from nsa_harness.core.collectives.repair import Edit, Repair, repairs
from nsa_harness.core.collectives.timeline import Event, Token, differing_field

_PLAIN = Event(
    group="0",
    op="all_reduce",
    from_python=True,
    place=line(10),
    elements=4,
    dtype="torch.float32",
    root=None,
    needs_equal_sizes=True,
    seq=None,
    at_s=0.0,
    is_done=True,
    step=1,
    position=0,
)
# By letter; `A` is `a` of another size, `l` is `a` from another line.
EVENTS = {
    "a": _PLAIN,
    "A": replace(_PLAIN, elements=5),
    "l": replace(_PLAIN, place=line(11)),
    "b": replace(_PLAIN, op="broadcast", place=line(20), needs_equal_sizes=False),
    "c": replace(_PLAIN, op="barrier", place=line(30), needs_equal_sizes=False),
    "d": replace(_PLAIN, op="all_gather", place=line(40), needs_equal_sizes=False),
    "u": replace(_PLAIN, from_python=False, place=None),
    "U": replace(_PLAIN, from_python=False, place=None, elements=5),
}


def events(letters: str) -> tuple[Token, ...]:
    return tuple(EVENTS[one].token for one in letters)


def edits(left: str, right: str) -> list[tuple[str, int, int, int]]:
    return [(one.edit, one.left, one.right, one.confirming_events) for one in repairs(events(left), events(right))]


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ("abc", "abc", []),
        ("ab", "abc", []),  # it has not come further
        ("", "abc", []),
        ("acd", "abcd", [(Edit.INSERT, 1, 1, 2)]),
        ("abcd", "acd", [(Edit.DELETE, 1, 1, 2)]),
        ("acbd", "abcd", [(Edit.SWAP, 1, 1, 1)]),
        ("aAcd", "aacd", [(Edit.REPLACE, 1, 1, 2)]),
        ("abd", "acd", [(Edit.REPLACE, 1, 1, 1)]),
        ("uUc", "uuc", [(Edit.REPLACE, 1, 1, 1)]),
        ("alc", "aac", []),  # the same operation from another line: a branch on each side
        ("lb", "ab", []),
        ("lbd", "acd", [(Edit.REPLACE, 1, 1, 1)]),
        ("bac", "adc", [(Edit.DELETE, 0, 0, 2), (Edit.REPLACE, 0, 0, 1)]),
    ],
)
def test_one_edit_is_found_where_it_was_made_with_what_both_share_behind_it(
    left: str, right: str, found: list[tuple[str, int, int, int]]
) -> None:
    assert edits(left, right) == found


def test_where_nothing_follows_every_edit_is_as_good() -> None:
    assert [one[0] for one in edits("ab", "ac")] == [Edit.INSERT, Edit.DELETE, Edit.REPLACE]
    assert {one[3] for one in edits("ab", "ac")} == {0}


def test_an_edit_that_what_follows_confirms_goes_before_one_that_nothing_does() -> None:
    assert [one[0] for one in edits("ac", "abc")] == [Edit.INSERT]
    assert [one[0] for one in edits("acb", "abc")] == [Edit.INSERT, Edit.DELETE]


def test_lines_that_shift_are_no_branch_on_each_side() -> None:
    """Two reductions of one size from two lines, of which the left one lacks the first, and the right one goes on."""
    assert edits("l" + "bcd", "al" + "bcd") == [(Edit.INSERT, 0, 0, 4)]


CONSECUTIVE = frozenset({frozenset((EVENTS["a"].site, EVENTS["l"].site))})


def test_a_call_of_one_rank_only_is_left_out_if_it_shifts_lines_that_follow_each_other() -> None:
    """The left rank reduces from line 11 twice more. Every later call of both ranks has the same size."""
    left, right = "aalaalaaa", "aaaaaaaab"
    assert edits(left, right) == [(Edit.DELETE, 5, 5, 3)]  # as if the lines were two branches
    found = repairs(events(left), events(right), CONSECUTIVE)
    assert [(one.edit, one.left, one.right) for one in found] == [(Edit.DELETE, 2, 2)]


def test_the_first_of_several_differences_is_named() -> None:
    assert edits("abcdbcAcd", "acdbcacd")[:1] == [(Edit.DELETE, 1, 1, 6)]


# By trying all of them.

_EDIT, _OTHER_LINE, _SHIFTED = 5, 3, 8
Script = tuple[Edit | None, int, int]  # its first edit, the price of all, how many events are shared


def pairs(one: Token, other: Token) -> bool:
    return one.site == other.site and differing_field(one, other) is None


def scripts(left: Sequence[Token], right: Sequence[Token], consecutive: bool) -> Iterator[Script]:
    """Every way to go through both; what pairs need not be paired."""
    if not left or not right:
        yield None, 0, 0
        return
    if pairs(left[0], right[0]):
        for first, price, shared in scripts(left[1:], right[1:], consecutive):
            yield first, price, shared + 1
    for edit, price, of_left, of_right in ways(left, right, consecutive):
        for _, more, shared in scripts(left[of_left:], right[of_right:], consecutive):
            yield edit, price + more, shared


def ways(
    left: Sequence[Token], right: Sequence[Token], consecutive: bool
) -> Iterator[tuple[Edit | None, int, int, int]]:
    yield Edit.INSERT, _EDIT, 0, 1
    yield Edit.DELETE, _EDIT, 1, 0
    branch = left[0].from_python and right[0].from_python and left[0].op == right[0].op
    if branch and differing_field(left[0], right[0]) is None:
        is_shift = consecutive and left[0].site != right[0].site
        yield (Edit.REPLACE, _SHIFTED, 1, 1) if is_shift else (None, _OTHER_LINE, 1, 1)
    else:
        yield Edit.REPLACE, _EDIT, 1, 1
    if len(left) > 1 and len(right) > 1 and pairs(left[0], right[1]) and pairs(left[1], right[0]):
        yield Edit.SWAP, _EDIT, 2, 2


def tried(left: Sequence[Token], right: Sequence[Token], consecutive: bool) -> list[tuple[Edit, int, int]]:
    i = j = 0
    while i < len(left) and j < len(right):
        if not pairs(left[i], right[j]):
            best: dict[Edit | None, tuple[int, int]] = {}
            for edit, price, shared in scripts(left[i:], right[j:], consecutive):
                best[edit] = min(best.get(edit, (99, 0)), (price, -shared))
            shared_by = {edit: one for edit, one in best.items() if one[1]} or best
            least = min(price for price, _ in shared_by.values())
            cheapest = [edit for edit, (price, _) in shared_by.items() if price == least]
            if None not in cheapest:
                return sorted((edit, i, j) for edit in cheapest if edit)
        i, j = i + 1, j + 1
    return []


@given(st.text("aAlbc", max_size=5), st.text("aAlbc", max_size=5), st.booleans())
def test_the_first_edits_are_those_of_the_cheapest_of_all_ways(left: str, right: str, consecutive: bool) -> None:
    sites = [EVENTS[letter].site for letter in "aAl"]
    pairs_of_sites = frozenset(frozenset((one, other)) for one in sites for other in sites if one != other)
    found = repairs(events(left), events(right), pairs_of_sites if consecutive else frozenset())
    expected = tried(events(left), events(right), consecutive)
    assert sorted((one.edit, one.left, one.right) for one in found) == expected


_MIRRORED = {Edit.INSERT: Edit.DELETE, Edit.DELETE: Edit.INSERT, Edit.SWAP: Edit.SWAP, Edit.REPLACE: Edit.REPLACE}


@given(st.text("aAlbcuU", max_size=9), st.text("aAlbcuU", max_size=9))
def test_an_insert_here_is_a_delete_there(left: str, right: str) -> None:
    mirrored = [
        Repair(edit=_MIRRORED[one.edit], left=one.right, right=one.left, confirming_events=one.confirming_events)
        for one in repairs(events(right), events(left))
    ]
    assert set(repairs(events(left), events(right))) == set(mirrored)


@given(st.text("abcdu", max_size=12), st.integers(0, 12))
def test_whoever_has_not_come_as_far_differs_in_nothing(letters: str, came: int) -> None:
    assert edits(letters, letters[:came]) == []


def test_what_lies_far_behind_and_what_is_too_far_apart_is_not_weighed() -> None:
    long = "abcd" * 100
    assert edits("l" + long + "ad", "a" + long + "bd") == [], "beyond what is laid side by side"
    assert edits(long + "ad", long + "bd") == [(Edit.REPLACE, 400, 400, 1)], "what both did alike does not count"
    assert edits("b" * 12 + "a" * 60, "a" * 60)[0] == (Edit.DELETE, 0, 0, 60)
    assert edits("b" * 13 + "a" * 60, "a" * 60)[0] == (Edit.DELETE, 0, 0, 59)
