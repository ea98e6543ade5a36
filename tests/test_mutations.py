"""Tests are tested: each entry of mutations.json breaks the code of judging or attention, and its test must fail."""

from __future__ import annotations

import builtins
import functools
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))

from mutate import NOTICED, SURVIVED, ask  # noqa: E402
from mutating import ENTRIES, Mutation, Unclear, mutated, read, words_of, written  # noqa: E402

MUTATIONS = read()
# Words of torch, triton and Python, and what the tape of autograd is made to remember.
FOREIGN = {"atomic_add", "block_indices", "is_fifo", "tril"}
CHEAP = next(one for one in MUTATIONS if one.function == "another_wanted")
CODE = '''\
"""Words."""

LIMIT_S: float = 3.0
NAMES = {"a": 1, "b": 2}


class Wait:
    """Docstrings do not count."""

    closed: bool = False

    def endless(self, rank: int, *, limit_s: float = 2.0) -> bool:
        """Neither do annotations."""

        def until(now_s: float) -> float:
            return now_s - limit_s

        # A comment stays.
        if rank is None or not self.closed:
            return f"{rank + 1}" == "2"
        values = [until(one) for one in (1, 2) if one > limit_s]
        values.append(until(rank + 1, 2))
        return values < [limit_s] and  self.closed  # two blanks stay
'''


def one_of_each_operator() -> list[Mutation]:
    """The first of each kind that a test of the core notices: cheap, and the same until the list itself changes."""
    first: dict[str, Mutation] = {}
    for one in MUTATIONS:
        if one.test.startswith("tests/core/"):
            first.setdefault(one.changes[0].partition(": ")[2].split()[0], one)
    return list(first.values())


@pytest.mark.parametrize(
    ("function", "change", "old", "new"),
    [
        ("Wait.endless", "1st comparison: with is not", "rank is None or not", "(rank is not None) or not"),
        ("Wait.endless", "1st comparison: negate", "rank is None or not", "(not rank is None) or not"),
        ("Wait.endless", "1st not: negate", "not self.closed", "(self.closed)"),
        ("Wait.endless", "1st not: drop", "rank is None or not self.closed", "(rank is None)"),
        ("Wait.endless", "1st or: with and", "rank is None or not self.closed", "(rank is None and (not self.closed))"),
        ("Wait.endless", "1st or: keep 2nd", "rank is None or not self.closed", "(not self.closed)"),
        (
            "Wait.endless.until",
            "1st function: empty",
            "def until(now_s: float) -> float:\n            return now_s - limit_s",
            "def until(now_s: float) -> float:\n            return None",
        ),
        (
            "Wait.endless",
            "1st if: drop",
            '        if rank is None or not self.closed:\n            return f"{rank + 1}" == "2"\n',
            "",
        ),
        (
            "Wait.endless",
            "1st if: keep body",
            '        if rank is None or not self.closed:\n            return f"{rank + 1}" == "2"',
            "        return f'{rank + 1}' == '2'",
        ),
        ("Wait.endless", "1st return: drop", 'return f"{rank + 1}" == "2"', "pass"),
        ("Wait.endless", "4th comparison: become False", "values < [limit_s]", "(False)"),
        ("Wait.endless", "1st name in 2nd return: become []", "values < ", "([]) < "),
        (
            "Wait.endless",
            "3rd comparison: drop",
            "[until(one) for one in (1, 2) if one > limit_s]",
            "([until(one) for one in (1, 2)])",
        ),
        ("Wait.endless", "1st tuple: swap", "(1, 2)", "((2, 1))"),
        ("Wait.endless", "3rd number: drop", "(1, 2)", "((1,))"),
        ("Wait.endless", "1st number: become 5", "limit_s: float = 2.0", "limit_s: float = (5)"),
        ("Wait.endless", "5th number: drop", "until(rank + 1, 2)", "(until(rank + 1))"),
        ("Wait.endless", "1st operation: with -", "rank + 1, 2", "(rank - 1), 2"),
        ("Wait.endless", "2nd attribute: name extend", "values.append", "(values.extend)"),
        ("Wait.endless.until", "1st return: become return 0.0", "return now_s - limit_s", "return 0.0"),
        ("Wait.closed", "1st constant: become True", "closed: bool = False", "closed: bool = (True)"),
        ("LIMIT_S", "1st number: become 4", "3.0", "(4)"),
        ("NAMES", "2nd number: drop", '{"a": 1, "b": 2}', "({'a': 1})"),
    ],
)
def test_a_change_touches_its_place_alone(function: str, change: str, old: str, new: str) -> None:
    assert CODE.count(old) == 1
    assert mutated(CODE, function, [change]) == CODE.replace(old, new)


@pytest.mark.parametrize(
    ("function", "change", "problem"),
    [
        ("sleep", "1st if: drop", "no function sleep; there are <module>, LIMIT_S, NAMES, Wait"),
        ("Wait.sleep", "1st if: drop", "no function Wait.sleep; there are Wait, Wait.closed, Wait.endless"),
        ("Wait.endless", "2nd if: drop", "Wait.endless has no '2nd if', but 1 of the kind"),
        ("Wait.endless", "first if: drop", "Wait.endless has no 'first if', but 0 of the kind"),
        ("Wait.endless", "1st name in 9th return: drop", "Wait.endless has no '9th return', but 2 of the kind"),
        ("Wait.endless", "1st if: negate", "a if cannot: negate"),
        ("Wait.endless", "1st or: with <", "a or has no place for this operator"),
        ("Wait.endless", "1st name: swap", "a name has no two to swap"),
        ("Wait.endless", "4th number: drop", "a operation cannot do without its right"),
    ],
)
def test_a_change_that_means_nothing_is_refused(function: str, change: str, problem: str) -> None:
    with pytest.raises(Unclear, match=problem):
        mutated(CODE, function, [change])


@pytest.mark.parametrize("file", sorted({one.file for one in MUTATIONS}))
def test_each_mutation_of_a_file_finds_its_place_and_changes_the_code(file: str) -> None:
    text = (ROOT / file).read_text()
    for one in MUTATIONS:
        if one.file == file:
            assert mutated(text, one.function, one.changes) != text


def test_each_mutation_names_a_test_that_exists() -> None:
    missing = [one.test for one in MUTATIONS if f"def {one.test.rpartition('::')[2]}(" not in source(one.test)]
    assert missing == []


def test_no_mutation_brings_a_name_along_that_the_code_does_not_know() -> None:
    """After a rename it would break the code by that name alone, and any test would notice."""
    ours = {name for folder in ("harness", "nsa") for path in (ROOT / folder).rglob("*.py") for name in names(path)}
    brought = {(name, one.name) for one in MUTATIONS for name in words_of(one.changes)}
    assert sorted((name, where) for name, where in brought if name not in ours | set(dir(builtins)) | FOREIGN) == []


@functools.cache
def names(path: Path) -> set[str]:
    return set(re.findall(r"\w+", path.read_text()))


@functools.cache
def source(test: str) -> str:
    return (ROOT / test.partition("::")[0]).read_text()


def test_the_entries_stand_in_order_one_a_line() -> None:
    assert ENTRIES.read_text(encoding="utf-8") == written(MUTATIONS), "python tools/mutating.py sorts them"


def test_one_mutation_of_each_operator_is_noticed_and_a_harmless_one_is_not() -> None:
    harmless = replace(CHEAP, changes=("1st comparison: become len(judged) + 1 <= policy.repeat",))
    chosen = one_of_each_operator()
    found = {one.changes: one for one in ask([*chosen, harmless], 1, time.monotonic() + 250)}
    assert {found[one.changes].outcome for one in chosen} == {NOTICED}
    assert found[harmless.changes].outcome == SURVIVED
    assert len(chosen) > 4
