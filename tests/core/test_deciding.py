"""Which names decide what a rank does at a line: pure, from the stored source."""

from __future__ import annotations

from textwrap import dedent

from nsa_harness.core.evidence.evidence import Source
from nsa_harness.core.report import Place
from nsa_harness.core.source_code.deciding import Deciding, deciding_expressions, definitions
from nsa_harness.core.source_code.program_source import ProgramSource

STOPPER = """\
def step(self, loss):
    if loss < self.best:
        self.best, self.bad = loss, 0
    else:
        self.bad += 1
    return self.bad >= self.patience or self.is_over()
"""
IS_OVER = """\
def is_over(self):
    return self.epoch == self.limits.epochs
"""
MAIN = """\
def main(args):
    for epoch, batch in enumerate(loader):
        loss = train(batch)
        if args.evaluate and not skips(epoch):
            if stopper.step(loss):
                break
        while len(queue) > self.most:
            pass
        dist.all_reduce(loss, group=groups[rank % 2])
    dist.barrier()
"""


def expressions(line: int, *functions: str) -> list[Deciding]:
    sources = [Source(file="/train.py", first=1 + 100 * number, text=text) for number, text in enumerate(functions)]
    return list(deciding_expressions(ProgramSource(tuple(sources)), Place(file="/train.py", line=line)))


def names(line: int, *functions: str) -> dict[int, tuple[str, ...]]:
    return {each.line: each.names for each in expressions(line, *(functions or (MAIN, STOPPER, IS_OVER)))}


def test_a_condition_gives_what_its_method_compares_through_its_object() -> None:
    found = names(5)
    assert found[5] == (
        "stopper.bad",
        "stopper.patience",
        "stopper.epoch",
        "stopper.limits.epochs",
        "stopper.best",
        "loss",
    )
    assert found[4] == ("args.evaluate", "epoch")
    assert found[2] == ("loader", "len(loader)")


def test_of_a_method_that_is_not_stored_any_attribute_of_its_object_may_decide() -> None:
    (condition, *_) = expressions(5, MAIN)
    assert (condition.names, condition.owners) == (("loss",), ("stopper",))
    values = {"loss": 1, "stopper.bad": 2, "stopped.bad": 3, "stopper": 4}
    assert condition.choose(values) == {"loss": 1, "stopper.bad": 2}


def test_a_length_in_a_condition_is_a_name_of_its_own() -> None:
    assert names(7)[7] == ("queue", "len(queue)", "self.most")


def test_a_call_gives_its_arguments_and_counts_only_if_they_differ() -> None:
    call, *others = expressions(9, MAIN)
    assert (call.line, call.names, call.is_call, call.is_around) == (9, ("loss", "groups", "rank"), True, False)
    assert {each.line: (each.is_call, each.is_around) for each in others} == {2: (False, True), 5: (False, False)}


def test_a_condition_that_ends_a_loop_decides_for_every_line_in_it() -> None:
    assert {each.line: each.is_around for each in expressions(3, MAIN)} == {3: False, 2: True, 5: True}


def test_a_place_without_stored_source_gives_nothing() -> None:
    assert expressions(999, MAIN) == []
    assert list(deciding_expressions(ProgramSource(()), Place())) == []


def test_source_that_is_not_python_gives_nothing() -> None:
    assert expressions(1, dedent("def broken(:\n    pass")) == []


def test_the_definitions_of_a_name_are_the_lines_of_its_function_that_it_depends_on() -> None:
    text = """\
def main(loader):
    limit = read_limit()
    total, seen = 0, 0
    for loss in loader:
        if total > limit:
            break
        seen = seen + 1
        part = loss / 2
        total += part
    limit = None
"""
    program = ProgramSource((Source(file="/train.py", first=1, text=text),))
    assert definitions(program, "/train.py", 5, "total") == (9, 8, 4, 3)
    assert definitions(program, "/train.py", 5, "len(limit)") == (2,)
    assert definitions(program, "/other.py", 5, "total") == ()
