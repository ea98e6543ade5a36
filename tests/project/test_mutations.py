"""Tests are tested: each entry of mutations.json breaks the code of judging or attention, and its test must fail."""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

from mutate import NOTICED, SURVIVED, ask  # noqa: E402
from mutating import ENTRIES, SOURCES, Anchors, Change, Mutation, Unclear, mutated, read, words_of, written  # noqa: E402
from mutation_moves import Sources  # noqa: E402

MUTATIONS = read()
# Words of torch, triton and Python, and what the tape of autograd is made to remember.
FOREIGN = {"atomic_add", "block_indices", "is_fifo", "tril"}
CHEAP = next(one for one in MUTATIONS if one.test == "tests/core/test_attempts.py::test_another_attempt")
HARMLESS = Change(
    statement="if len(counted_attempts) < policy.repeat:",
    expression="len(counted_attempts) < policy.repeat",
    do="become len(counted_attempts) + 1 <= policy.repeat",
)
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
            first.setdefault(one.changes[0].do.split()[0], one)
    return list(first.values())


IF = "if rank is None or not self.closed:"
EITHER = "rank is None or not self.closed"
VALUES = "values = [until(one) for one in (1, 2) if one > limit_s]"
APPEND = "values.append(until(rank + 1, 2))"
LAST = "return values < [limit_s] and self.closed"


@pytest.mark.parametrize(
    ("statement", "expression", "do", "old", "new"),
    [
        (IF, "rank is None", "with is not", "rank is None or not", "(rank is not None) or not"),
        (IF, "rank is None", "negate", "rank is None or not", "(not rank is None) or not"),
        (IF, "not self.closed", "negate", "not self.closed", "(self.closed)"),
        (IF, "not self.closed", "drop", EITHER, "(rank is None)"),
        (IF, EITHER, "with and", EITHER, "(rank is None and (not self.closed))"),
        (IF, EITHER, "keep 2nd", EITHER, "(not self.closed)"),
        (
            "def until(...)",
            "",
            "empty",
            "def until(now_s: float) -> float:\n            return now_s - limit_s",
            "def until(now_s: float) -> float:\n            return None",
        ),
        (IF, "", "drop", f'        {IF}\n            return f"{{rank + 1}}" == "2"\n', ""),
        (
            IF,
            "",
            "keep body",
            f'        {IF}\n            return f"{{rank + 1}}" == "2"',
            "        return f'{rank + 1}' == '2'",
        ),
        ("return f'{rank + 1}' == '2'", "", "drop", 'return f"{rank + 1}" == "2"', "pass"),
        ('return f"{rank + 1}" == "2"', "", "drop", 'return f"{rank + 1}" == "2"', "pass"),
        ("return f'{rank + 1}' ...", "'2'", "become '3'", '"2"', "('3')"),
        (LAST, "values < [limit_s]", "become False", "values < [limit_s]", "(False)"),
        (LAST, "values", "become []", "values < ", "([]) < "),
        (VALUES, "one > limit_s", "drop", VALUES.removeprefix("values = "), "([until(one) for one in (1, 2)])"),
        (VALUES, "(1, 2)", "swap", "(1, 2)", "((2, 1))"),
        (VALUES, "2", "drop", "(1, 2)", "((1,))"),
        ("def endless(...)", "2.0", "become 5", "limit_s: float = 2.0", "limit_s: float = (5)"),
        (APPEND, "2", "drop", "until(rank + 1, 2)", "(until(rank + 1))"),
        (APPEND, "rank + 1", "with -", "rank + 1, 2", "(rank - 1), 2"),
        (APPEND, "values.append", "name extend", "values.append", "(values.extend)"),
        ("return now_s - limit_s", "", "become return 0.0", "return now_s - limit_s", "return 0.0"),
        ("closed: bool = False", "False", "become True", "closed: bool = False", "closed: bool = (True)"),
        ("LIMIT_S: float = 3.0", "3.0", "become 4", "3.0", "(4)"),
        ("NAMES = {'a': 1, 'b': 2}", "2", "drop", '{"a": 1, "b": 2}', "({'a': 1})"),
    ],
)
def test_a_change_touches_its_place_alone(statement: str, expression: str, do: str, old: str, new: str) -> None:
    assert CODE.count(old) == 1
    change = Change(statement=statement, expression=expression, do=do)
    assert mutated(CODE, [change]) == CODE.replace(old, new)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (Change(statement="sleep()", do="drop"), "0 nodes fit 'sleep() | drop'; the statement is in no function"),
        (
            Change(function="Wait", statement=IF, do="drop"),
            f"0 nodes fit 'Wait | {IF} | drop'; the statement is in no function",
        ),
        (
            Change(statement=IF, expression="late", do="drop"),
            f"0 nodes fit '{IF} | late | drop'; the statement is in Wait.endless",
        ),
        (
            Change(statement=VALUES, expression="one", nth=4, do="drop"),
            f"0 nodes fit '{VALUES} | one | 4th | drop'; the statement is in Wait.endless",
        ),
        (
            Change(statement=VALUES, expression="one", do="drop"),
            f"3 nodes fit '{VALUES} | one | drop'; the statement is in Wait.endless",
        ),
        (
            Change(statement="return ...", do="drop"),
            "3 nodes fit 'return ... | drop'; the statement is in Wait.endless.until, Wait.endless",
        ),
        (Change(statement=IF, do="negate"), "a If cannot: negate"),
        (Change(statement=IF, expression=EITHER, do="with <"), "a BoolOp has no place for this operator"),
        (Change(statement=IF, expression="rank", do="swap"), "a Name has no two to swap"),
        (Change(statement=APPEND, expression="1", do="drop"), "a BinOp cannot do without its right"),
    ],
)
def test_a_change_that_means_nothing_is_refused(change: Change, problem: str) -> None:
    with pytest.raises(Unclear) as refused:
        mutated(CODE, [change])
    assert str(refused.value) == problem


@pytest.fixture
def sources(tmp_path: Path) -> Callable[..., Sources]:
    """Write the files and index them."""

    def write(**files: str) -> Sources:
        for name, text in files.items():
            path = tmp_path / SOURCES[0] / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return Sources(tmp_path)

    return write


WAIT_FILE = f"{SOURCES[0]}/wait.py"
EMPTY = "def empty() -> None: ..."


def followed(found: Sources, old: str = CODE, **values: Any) -> Mutation | None:
    """Where an entry for harness/wait.py, whose text was `old`, is found today."""
    entry = Mutation(file=WAIT_FILE, changes=(Change(**values),), test="t")
    return found.follow(entry, Anchors(ast.parse(old)))


def test_an_entry_that_fits_stays_as_it_is(sources: Callable[..., Sources]) -> None:
    assert followed(sources(wait=CODE, other=EMPTY), statement=IF, do="drop") == Mutation(
        file=WAIT_FILE, changes=(Change(statement=IF, do="drop"),), test="t"
    )


def test_an_entry_follows_its_statement_to_another_file(sources: Callable[..., Sources]) -> None:
    found = followed(sources(wait=EMPTY, other=CODE), statement=IF, expression="rank is None", do="drop")
    assert found is not None
    assert found.file == f"{SOURCES[0]}/other.py"
    assert found.changes == (Change(statement=IF, expression="rank is None", do="drop"),)


def test_an_entry_follows_a_renamed_function_and_names_it_only_where_the_statement_is_common(
    sources: Callable[..., Sources],
) -> None:
    renamed = CODE.replace("endless", "is_endless")
    found = followed(sources(wait=renamed), function="Wait.endless", statement=IF, do="drop")
    assert found is not None
    assert found.changes == (Change(statement=IF, do="drop"),)
    found = followed(sources(wait=renamed, other=CODE), statement=IF, do="drop")
    assert found is not None
    assert found.changes == (Change(function="Wait.is_endless", statement=IF, do="drop"),)


def test_an_entry_follows_names_that_change_in_its_statement(sources: Callable[..., Sources]) -> None:
    renamed = CODE.replace("limit_s", "deadline_s").replace("one", "number")
    found = followed(sources(wait=renamed), statement=VALUES, expression="one > limit_s", do="become one > limit_s + 1")
    assert found is not None
    (change,) = found.changes
    assert change.statement == "values = [until(number) for number in (1, 2) if number > deadline_s]"
    assert (change.expression, change.do) == ("number > deadline_s", "become number > deadline_s + 1")


def test_an_entry_for_a_function_follows_its_new_name_by_its_body(sources: Callable[..., Sources]) -> None:
    found = followed(sources(wait=CODE.replace("until", "left_s")), statement="def until(...)", do="empty")
    assert found is not None
    assert found.changes == (Change(statement="def left_s(...)", do="empty"),)


@pytest.mark.parametrize(
    "files",
    [
        {"wait": EMPTY, "one": CODE, "other": CODE},  # two files hold the statement
        {"wait": CODE.replace("None or not", "None and not")},  # its code is another
        {"wait": CODE.replace(IF, "if seed is Ellipsis or not policy.loose:")},  # too many names changed
    ],
)
def test_an_entry_that_fits_no_place_or_several_is_left_to_its_reader(
    files: dict[str, str], sources: Callable[..., Sources]
) -> None:
    found = sources(**files)
    entry = Mutation(file=WAIT_FILE, changes=(Change(statement=IF, do="drop"),), test="t")
    assert found.problem(entry) is not None
    assert found.follow(entry) is None


def test_a_moved_folder_keeps_the_place_of_a_statement_that_many_files_hold(tmp_path: Path) -> None:
    for file in ("a/core/wait.py", "a/core/other.py", "b/wait.py"):
        path = tmp_path / SOURCES[0] / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CODE)
    old = f"{SOURCES[0]}/core/wait.py"
    entry = Mutation(file=old, changes=(Change(function="Wait.endless", statement=IF, do="drop"),), test="t")
    assert Sources(tmp_path).follow(entry) == replace(entry, file=f"{SOURCES[0]}/a/core/wait.py")


@pytest.mark.parametrize("file", sorted({one.file for one in MUTATIONS}))
def test_each_mutation_of_a_file_finds_its_place_and_changes_the_code(file: str) -> None:
    text = (ROOT / file).read_text()
    for one in MUTATIONS:
        if one.file == file:
            assert mutated(text, one.changes) != text


def test_each_mutation_names_a_test_that_exists() -> None:
    missing = [one.test for one in MUTATIONS if f"def {one.test.rpartition('::')[2]}(" not in source(one.test)]
    assert missing == []


def test_no_mutation_brings_a_name_along_that_the_code_does_not_know() -> None:
    """After a rename it would break the code by that name alone, and any test would notice."""
    ours = {name for folder in SOURCES for path in (ROOT / folder).rglob("*.py") for name in names(path)}
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
    harmless = replace(CHEAP, changes=(HARMLESS,))
    chosen = one_of_each_operator()
    found = {one.mutation: one for one in ask([*chosen, harmless], 1, time.monotonic() + 250)}
    assert {found[one.name].outcome for one in chosen} == {NOTICED}
    assert found[harmless.name].outcome == SURVIVED
    assert len(chosen) > 4
