"""The program's source beside the evidence: what of it is kept, and which branches lead to a line."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
from builders import C10D, USER, evidence, frame, raised, rank_evidence, rank_snapshot, stalled
from lockstep import line

from nsa_harness.core.evidence.evidence import Evidence, Source
from nsa_harness.core.outcome.outcome import skipped_outcome
from nsa_harness.core.plan import Skip
from nsa_harness.core.report import Culprit, Place
from nsa_harness.core.source_code.collection import excerpts, program_lines
from nsa_harness.core.source_code.excerpt import Branch
from nsa_harness.core.source_code.program_source import ProgramSource
from nsa_harness.supervisor.storage.rundir import AttemptDir
from nsa_harness.supervisor.storage.sources import FILE, with_source_text, with_sources

PROGRAM = dedent(
    """\
    import torch

    is_main = rank == 0
    if is_main:
        save(model)

    class Trainer:
        @property
        def step(self):
            return self._step

        def fit(self, loader, rank):
            is_first = rank == 0
            for batch in loader:
                if batch.bad:
                    continue
                try:
                    loss = self.model(batch)
                except ValueError:
                    continue
                if is_first and self.step % 10 == 0:
                    def log():
                        return reduce(loss)
                    log()
                while loss > 1:
                    loss = halve(loss)
                reduce(loss)
            barrier()
    """
)


def at(text: str, nth: int = 1) -> int:
    """The line of the program with that text."""
    return [number for number, line_of in enumerate(PROGRAM.splitlines(), start=1) if text in line_of][nth - 1]


def kept(*texts: str) -> tuple[Source, ...]:
    return tuple(excerpts(USER, PROGRAM, {at(text) for text in texts}))


def spans(*texts: str) -> list[tuple[int, int]]:
    return [(one.first, one.first + one.text.count("\n")) for one in kept(*texts)]


def test_of_each_line_the_innermost_function_is_kept_and_once() -> None:
    fit = (at("def fit"), at("barrier()"))
    assert spans("reduce(loss)", "barrier()") == [fit, (at("def log"), at("return reduce"))]
    assert spans("continue", "barrier()") == [fit]
    assert spans("return self._step") == [(at("@property"), at("return self._step"))], "with its decorators"


def test_outside_of_functions_the_statement_of_the_module_is_kept() -> None:
    assert spans("save(model)") == [(at("if is_main"), at("save(model)"))]
    assert spans("import torch") == [(1, 1)]
    assert list(excerpts(USER, PROGRAM, {2, 999})) == []


@pytest.mark.parametrize("text", ["def f(:\n", "x = 1\0\n", "\x7fELF"])
def test_nothing_is_kept_of_what_is_no_python(text: str) -> None:
    assert list(excerpts(USER, text, {1})) == []


def test_a_function_of_very_many_lines_is_left_out() -> None:
    def long(lines: int) -> str:
        return "def f():\n" + "    x = 1\n" * (lines - 1)

    assert len(list(excerpts(USER, long(400), {2}))) == 1
    assert list(excerpts(USER, long(401), {2})) == []


def test_every_line_of_the_program_that_the_evidence_names_is_looked_up_and_none_of_a_library() -> None:
    looks = stalled(rank_snapshot(0, frame(3252, file=C10D), frame(40))).snapshots
    failed = rank_evidence(0, exception=raised(0, frames=(frame(88, file="relative.py"), frame(12))))
    assert program_lines(evidence(failed, snapshots=looks)) == {USER: {40, 12}}


def test_the_statement_of_a_line_is_that_line_without_its_indent() -> None:
    assert ProgramSource(kept("barrier()")).statement(line(at("for batch"))) == "for batch in loader:"
    assert ProgramSource(kept("barrier()")).statement(line(1)) is None
    assert ProgramSource(()).statement(line(at("barrier()"))) is None


# Branches.


def leading_to(text: str) -> list[tuple[str, int, bool]]:
    sources = kept(text)
    return [(one.text, one.line, one.reads_rank) for one in ProgramSource(sources).branches(line(at(text)))]


def test_a_condition_around_a_line_leads_to_it_and_says_whether_it_asks_for_the_rank() -> None:
    assert ProgramSource(kept("save(model)")).branches(line(at("save(model)"))) == (
        Branch(
            file=USER,
            line=at("if is_main"),
            function="<module>",
            text="if is_main",
            reads_rank=True,
            leaves_block=False,
            leaves_function=False,
            may_differ=True,
            is_handler=False,
            continues_at=at("if is_main"),
        ),
    )


def test_a_line_in_an_else_is_reached_if_the_condition_is_false() -> None:
    text = "def publish():\n    if rank == 0:\n        wait()\n    elif name:\n        put()\n    else:\n        skip()"
    program = ProgramSource((Source(file=USER, first=1, text=text),))
    branches = {number: program.branches(line(number)) for number in (3, 5, 7)}
    assert {number: [(one.text, one.is_else) for one in found] for number, found in branches.items()} == {
        3: [("if rank == 0", False)],
        5: [("elif name", False), ("if rank == 0 … else", True)],
        7: [("elif name … else", True), ("if rank == 0 … else", True)],
    }


def test_conditions_come_from_the_inside_out_and_then_the_jumps_before_in_the_same_loop() -> None:
    assert leading_to("loss = halve(loss)")[0] == ("while loss > 1", at("while loss"), False)
    assert leading_to("log()") == []  # the first line with that text is the definition itself
    found = leading_to("if is_first")
    assert [one[0] for one in found] == ["if is_first and self.step % 10 == 0", "if batch.bad", "except ValueError"]


def test_a_condition_that_asks_a_variable_which_was_given_the_rank_asks_for_the_rank() -> None:
    found = leading_to("if is_first")
    assert [one[2] for one in found] == [True, False, False]


@pytest.mark.parametrize(
    ("test", "of_rank"),
    [
        ("rank == 0", True),
        ("not self.is_main_process", True),
        ("dist.get_rank() > 0", True),
        ("os.environ['LOCAL_RANK'] == '0'", True),
        ("accelerator.is_local_main_process", True),
        ("on_master", True),
        ("step % 10 == 0", False),
        ("domain == 'main'", False),
    ],
)
def test_what_a_condition_asks_is_told_by_its_words(test: str, of_rank: bool) -> None:
    source = Source(file=USER, first=10, text=f"if {test}:\n    barrier()")
    (branch,) = ProgramSource((source,)).branches(line(11))
    assert branch.reads_rank is of_rank


def test_a_jump_behind_a_line_or_in_a_function_that_does_not_hold_it_leads_nowhere() -> None:
    found = leading_to("if batch.bad")
    assert [one[0] for one in found] == ["if batch.bad"]
    assert leading_to("return reduce") == []


def test_a_handler_around_a_line_leads_to_it() -> None:
    sources = kept("barrier()")
    found = ProgramSource(sources).branches(line(at("continue", 2)))
    assert ("except ValueError", at("except ValueError")) in [(one.text, one.line) for one in found]


def test_of_a_line_that_is_not_kept_nothing_is_known() -> None:
    assert ProgramSource(()).branches(line(5)) == ()
    assert ProgramSource(kept("save(model)")).branches(line(at("barrier()"))) == ()


def test_of_several_excerpts_that_hold_a_line_the_smallest_counts() -> None:
    sources = kept("return reduce", "barrier()")
    assert ProgramSource(sources).loops_left(inside=line(at("reduce(loss)", 2)), outside=line(at("barrier()")))
    assert ProgramSource(sources).branches(line(at("return reduce"))) == ()


@pytest.mark.parametrize(
    ("inside", "outside", "left"),
    [
        ("reduce(loss)", "barrier()", ["for batch"]),
        ("barrier()", "for batch", []),
        ("if batch.bad", "if is_first", []),  # the same loop
        ("loss = halve(loss)", "barrier()", ["while loss", "for batch"]),
        ("loss = halve(loss)", "reduce(loss)", ["while loss"]),
        ("is_first = rank", "barrier()", []),  # in no loop
        ("if batch.bad", "save(model)", []),  # another function
    ],
)
def test_who_stands_behind_the_loops_around_another_line_has_left_them(
    inside: str, outside: str, left: list[str]
) -> None:
    sources = tuple(excerpts(USER, PROGRAM, {at("barrier()"), at("save(model)")}))
    where, behind = (at(one, 2 if one == "reduce(loss)" else 1) for one in (inside, outside))
    found = ProgramSource(sources).loops_left(inside=frame(where), outside=frame(behind))
    assert [one.line for one in found] == [at(one) for one in left]


FLAT = """\
for batch in batches:
    train(batch)
dist.barrier()
def save():
    dist.barrier()
"""


def test_statements_outside_of_functions_are_one_function_although_each_is_kept_alone() -> None:
    program = ProgramSource(tuple(excerpts(USER, FLAT, {2, 3, 5})))
    assert [one.first for one in program.excerpts] == [1, 3, 4]
    assert [loop.line for loop in program.loops_left(inside=line(2), outside=line(3))] == [1]
    assert program.loops_left(inside=line(2), outside=line(5)) == (), "in another function"
    assert program.are_alternatives([line(2)], [line(3)]), "not known: only lines of one statement are compared"


def test_an_excerpt_that_cannot_be_read_alone_leads_nowhere() -> None:
    broken = Source(file=USER, first=1, text="    if rank == 0:\n  barrier()")
    assert ProgramSource((broken,)).branches(line(2)) == ()


# Stored as it ran, when its run is judged, and read from there alone.

TEXT = "def step():\n    loss.backward()\n"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TEXT)
    os.utime(path, (1000.0, 1000.0))
    return path


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    made = AttemptDir(tmp_path / "one")
    made.path.mkdir()
    made.spec.write_text("{}")
    os.utime(made.spec, (2000.0, 2000.0))
    return made


def seen(program: Path, line: int = 2) -> Evidence:
    """A rank that raised in that line."""
    known = rank_evidence(0, exception=raised(0, frames=(frame(line, file=str(program)),)))
    return evidence(known)


def test_the_function_around_a_line_is_stored_with_the_attempt(program: Path, attempt: AttemptDir) -> None:
    kept = with_sources(attempt, seen(program), launched_here=True)
    assert kept.sources == (Source(file=str(program), first=1, text=TEXT.rstrip()),)
    assert (attempt.path / FILE).exists()


def test_what_is_stored_is_not_read_again(program: Path, attempt: AttemptDir) -> None:
    first = with_sources(attempt, seen(program), launched_here=True)
    program.write_text("another = 1\nprogram = 2\n")
    assert with_sources(attempt, seen(program), launched_here=True).sources == first.sources


def test_of_an_attempt_that_was_launched_elsewhere_no_file_is_read(program: Path, attempt: AttemptDir) -> None:
    assert with_sources(attempt, seen(program), launched_here=False).sources == ()
    assert not (attempt.path / FILE).exists()


def test_a_file_that_was_edited_since_the_launch_is_left_out(program: Path, attempt: AttemptDir) -> None:
    os.utime(program, (3000.0, 3000.0))
    assert with_sources(attempt, seen(program), launched_here=True).sources == ()


def test_no_directory_no_file_that_is_gone_and_no_large_one_is_read(program: Path, attempt: AttemptDir) -> None:
    program.write_text(TEXT + "x = 1\n" * 200_000)
    os.utime(program, (1000.0, 1000.0))
    for path in (program, program.parent, program.parent / "gone.py", program.parent / "a\0b.py"):
        (attempt.path / FILE).unlink(missing_ok=True)
        assert with_sources(attempt, seen(path), launched_here=True).sources == ()


def test_a_stored_file_that_cannot_be_read_is_trouble_and_ends_nothing(program: Path, attempt: AttemptDir) -> None:
    (attempt.path / FILE).write_text("no json")
    told = with_sources(attempt, seen(program), launched_here=True)
    assert told.sources == ()
    assert [one.what for one in told.trouble] == [FILE]


def test_the_statement_of_a_place_is_quoted_from_what_is_stored() -> None:
    sources = (Source(file="/home/ada/train.py", first=1, text=TEXT),)

    def text_of(line: int) -> str | None:
        place = Place(file="/home/ada/train.py", line=line)
        culprit = Culprit(ranks=(1,), step=3, collective=None, place=place)
        told = with_source_text(
            replace(skipped_outcome(Skip(scenario="one", about="", reason="")), culprit=culprit), sources
        ).culprit
        assert told is not None
        assert told.place is not None
        return told.place.text

    assert (text_of(2), text_of(9)) == ("loss.backward()", None)


@pytest.mark.parametrize(
    ("test", "varies"),
    [
        ("i % 4 == 0", False),
        ("(i + 1) % every == 0", False),
        ("i % cfg.every == 0", False),
        ("i == LAST", False),
        ("i % 4 == 0 and not done", True),
        ("batch.bad", True),
    ],
)
def test_counters_and_settings_are_the_same_on_every_rank(test: str, varies: bool) -> None:
    """Whatever the period of a counter is called."""
    text = f"def fit(loader):\n    for i, batch in enumerate(loader):\n        if {test}:\n            reduce()"
    (found,) = ProgramSource((Source(file=USER, first=1, text=text),)).branches(line(4))
    assert found.may_differ is varies


def test_that_a_file_is_the_program_decides_nothing_between_ranks() -> None:
    text = 'if __name__ == "__main__":\n    if ready:\n        main()\n'
    found = ProgramSource((Source(file=USER, first=1, text=text),)).branches(line(3))
    assert [one.text for one in found] == ["if ready"]


ALTERNATIVES = """\
def step(rank, loss):
    if rank == 0:
        first()
    else:
        second()
    for number in range(3):
        if loss > number:
            third()
            continue
        fourth()
    if rank != 0:
        fifth()
    try:
        sixth()
    except ValueError:
        seventh()
    eighth()
"""


@pytest.mark.parametrize(
    ("one", "other", "may_be"),
    [
        ("first", "second", True),
        ("third", "fourth", True),  # the first of them ends with a jump
        ("sixth", "seventh", True),
        ("first", "fifth", True),  # each has a condition of its own, which may exclude the other one
        ("fourth", "fifth", False),
        ("first", "eighth", False),
        ("fourth", "eighth", False),
    ],
)
def test_two_lines_are_alternatives_if_a_rank_may_execute_only_one_of_them(one: str, other: str, may_be: bool) -> None:
    lines = {text.strip().removesuffix("()"): number for number, text in enumerate(ALTERNATIVES.splitlines(), 1)}
    program = ProgramSource((Source(file=USER, first=1, text=ALTERNATIVES),))
    paths = [[Place(file=USER, line=lines[name], function="step")] for name in (one, other)]
    assert program.are_alternatives(*paths) is may_be
    assert program.are_alternatives(*reversed(paths)) is may_be
    assert ProgramSource(()).are_alternatives(*paths), "without the source it is unknown"
