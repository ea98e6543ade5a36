"""An experiment changes one value or decision of a program, records it, and never runs the program's own code."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).parents[1] / "support" / "traced.py"
VERSIONS = {"this": sys.executable} | {
    version: str(Path.home() / ".pyenv" / "versions" / version / "bin" / "python") for version in ("3.12.1", "3.13.0")
}


@pytest.fixture(params=VERSIONS)
def python(request: pytest.FixtureRequest) -> str:
    path = VERSIONS[request.param]
    if not Path(path).exists():
        pytest.skip(f"Python {request.param} is not installed with pyenv")
    return path


@dataclass
class Ranks:
    """Ranks of a program that run one after the other, first the reference rank."""

    directory: Path
    python: str

    def run(self, program: str, settings: dict[str, Any]) -> tuple[list[str], list[Any]]:
        """Return what each rank prints, and the events of rank 1. "#at" and "#call" mark lines."""
        file = self.directory / "train.py"
        file.write_text(program, encoding="utf-8")
        marks = [(name, number) for number, line in enumerate(program.splitlines(), 1) for name in line.split("#")[1:]]
        lines, calls = dict(marks), [[str(file), number] for name, number in marks if name == "call"]
        settings = {"file": str(file), "line": lines["at"], "ranks": [1], "wait_s": 0.3} | settings
        if calls:
            settings["callers"] = calls
        for old in self.directory.glob("*experiment*"):
            old.unlink()
        command = [self.python, str(DRIVER), json.dumps(settings), str(self.directory), str(file)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stderr
        events = [
            json.loads(line)
            for log in self.directory.glob("*.experiment.jsonl")
            for line in log.read_text().splitlines()
        ]
        outputs = [output.strip() for output in run.stdout.split("-----")[:2]]
        return outputs, [event for event in events if event["rank"] == 1]


@pytest.fixture
def job(tmp_path: Path, python: str) -> Ranks:
    return Ranks(tmp_path, python)


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """Ranks in the Python that runs the tests, which has torch."""
    return Ranks(tmp_path, sys.executable)


def told(events: list[Any]) -> list[tuple[Any, ...]]:
    """The event, the occurrence and the reason of each event."""
    return [(event["event"], event["occurrence"], event["reason"]) for event in events]


RANK = "import os\nrank = int(os.environ['RANK'])\n"


def name(*parts: object) -> list[list[object]]:
    kinds = {str: "attribute", int: "item"}
    return [["name", parts[0]], *([kinds[type(part)], part] for part in parts[1:])]


LOCAL = f"""{RANK}
def main():
    out = []
    for step in range(3):
        loss = rank + step / 2
        out.append(loss) #at
    print(out)
main()
"""


def test_a_local_becomes_that_of_the_reference_rank_before_it_is_used(job: Ranks) -> None:
    outputs, events = job.run(LOCAL, {"kind": "scalar", "path": name("loss"), "from": 2})
    assert outputs == ["[0.0, 0.5, 1.0]", "[1.0, 0.5, 1.0]"]
    assert told(events) == [("changed", 2, ""), ("changed", 3, "")]
    assert (events[0]["before"], events[0]["after"], events[1]["count"]) == (1.5, 0.5, 2)


def test_a_control_run_waits_for_the_reference_rank_and_changes_nothing(job: Ranks) -> None:
    settings = {"kind": "scalar", "path": name("loss"), "control": True}
    outputs, events = job.run(LOCAL, settings)
    assert (outputs, events) == (["[0.0, 0.5, 1.0]", "[1.0, 1.5, 2.0]"], [])
    _, events = job.run(LOCAL, settings | {"reference": 7})
    assert told(events) == [("refused", 1, "no value from the reference rank")]


@pytest.mark.parametrize(
    ("value", "expected", "event"),
    [
        ("list(range(4 + rank))", "[0, 1, 2, 3]", "changed"),
        ("range(4 + rank)", "range(0, 4)", "changed"),
        ("tuple(range(4 - rank))", "(0, 1, 2)", "equal"),
        ("dict.fromkeys(range(4 + rank))", "{0: None, 1: None, 2: None, 3: None, 4: None}", "refused"),
    ],
)
def test_a_sequence_is_cut_to_its_length_on_the_reference_rank(
    job: Ranks, value: str, expected: str, event: str
) -> None:
    program = f"{RANK}\ndef main():\n    items = {value} #at\n    print(items)\nmain()\n"
    outputs, events = job.run(program, {"kind": "length", "path": name("items"), "after": True})
    assert (outputs[1], [one["event"] for one in events]) == (expected, [event])
    if event == "changed":
        assert (events[0]["before"], events[0]["after"]) == (5, 4)


def test_a_tensor_and_an_array_are_cut_to_the_length_on_the_reference_rank(ranks: Ranks) -> None:
    made = "torch.arange(4 + rank)", "torch.arange(4 + rank).numpy()"
    for value in made:
        program = f"{RANK}import torch\ndef main():\n    items = {value} #at\n    print(items.shape[0])\nmain()\n"
        assert ranks.run(program, {"kind": "length", "path": name("items"), "after": True})[0] == ["4", "4"]


def test_a_value_is_replaced_after_its_definition_and_in_a_closure(job: Ranks) -> None:
    program = f"""{RANK}
def main():
    best = 0
    def note():
        nonlocal best
        best = rank + 7 #at
        return best
    print(note(), best)
main()
"""
    outputs, _ = job.run(program, {"kind": "scalar", "path": name("best"), "after": True})
    assert outputs == ["7 7", "7 7"]


STATE = f"""{RANK}
import types
armed = []
class Slots:
    __slots__ = ("bad",)
class State:
    seen = rank
class Guarded:
    def __init__(self):
        self.bad = rank
    def __setattr__(self, key, value):
        self.__dict__[key] = value
        armed and print("ran")
class Property:
    @property
    def bad(self):
        return rank
    @bad.setter
    def bad(self, value):
        armed and print("ran")
class Missing:
    def __getattr__(self, key):
        armed and print("ran")
        return 5
class Meta(type):
    def __eq__(cls, other):
        armed and print("ran")
        return False
    def __hash__(cls):
        armed and print("ran")
        return 1
    def __instancecheck__(cls, value):
        armed and print("ran")
        return True
class Number(int, metaclass=Meta):
    def __eq__(self, other):
        armed and print("ran")
        return True
    def __hash__(self):
        armed and print("ran")
        return 7
class Mapping(dict):
    def __getitem__(self, key):
        armed and print("ran")
    def __setitem__(self, key, value):
        armed and print("ran")
class Faked:
    bad = 1
    @property
    def __dict__(self):
        armed and print("ran")
        return {{"bad": 1}}
    @property
    def __class__(self):
        armed and print("ran")
        return int
class Reading:
    def __init__(self):
        object.__setattr__(self, "bad", rank)
    def __getattribute__(self, key):
        armed and print("ran")
        return 5
slots, state, guarded, prop, missing, faked, reading = (
    Slots(), State(), Guarded(), Property(), Missing(), Faked(), Reading())
slots.bad = rank
number, mapping, keyed = Number(rank), Mapping(bad=rank), {{"ok": rank}}
hostile = {{Number(3): rank, 7: rank}}
lists, text, nothing = [rank, {{"x": (rank, rank)}}], "s" * (rank + 1), None
top, key, space = rank, 'ok', types.SimpleNamespace(bad=rank)
armed.append(1)
done = True #at
armed.clear()
"""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (name("slots", "bad"), "slots.bad"),
        (name("State", "seen"), "State.seen"),
        (name("guarded", "bad"), "guarded.bad"),
        (name("space", "bad"), "space.bad"),
        (name("reading", "bad"), "object.__getattribute__(reading, 'bad')"),
        (name("top"), "top"),
        (name("lists", 0), "lists[0]"),
        ([["name", "keyed"], ["item", "ok"]], "keyed['ok']"),
        ([["name", "lists"], ["item", 1], ["item", "x"]], "lists[1]['x'][0]"),
        (name("text"), "len(text) - 1"),
        ([["name", "keyed"], ["item of", "key"]], "keyed['ok']"),
    ],
)
def test_every_plain_place_of_a_value_can_be_set_without_running_code(job: Ranks, path: object, value: str) -> None:
    outputs, events = job.run(f"{STATE}print({value})\n", {"kind": "scalar", "path": path})
    assert outputs == ["0", "0"]
    assert told(events) == [("changed", 1, "")]
    assert "ss" not in json.dumps(events)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (name("prop", "bad"), "property"),
        (name("missing", "bad"), "unbound"),
        (name("faked", "bad"), "no plain attributes"),
        (name("number"), "type"),
        (name("mapping"), "type"),
        ([["name", "mapping"], ["item", "bad"]], "container"),
        ([["name", "hostile"], ["item", 7]], "keys"),
        (name("slots"), "type"),
        (name("nowhere"), "unbound"),
        (name("nothing", "bad"), "no plain attributes"),
    ],
)
def test_a_value_that_only_code_of_the_program_can_set_is_refused(job: Ranks, path: object, reason: str) -> None:
    outputs, events = job.run(f"{STATE}print('end')\n", {"kind": "scalar", "path": path})
    assert outputs == ["end", "end"]
    assert told(events) == [("refused", 1, reason)]


def test_a_value_of_another_type_is_not_replaced(job: Ranks) -> None:
    program = f"{RANK}x = 3 if rank else True\nprint(x) #at\n"
    outputs, events = job.run(program, {"kind": "scalar", "path": name("x")})
    assert outputs == ["True", "3"]
    assert told(events) == [("refused", 1, "kind")]


def test_a_rank_that_gets_no_value_waits_once_and_goes_on(job: Ranks) -> None:
    program = f"{RANK}for step in range(50 * rank):\n    x = step\n    y = x #at\nprint('end')\n"
    outputs, events = job.run(program, {"kind": "scalar", "path": name("x")})
    assert outputs == ["end", "end"]
    assert told(events) == [("refused", 1, "no value from the reference rank")]


LEAK = f"""{RANK}
class Stopper:
    def __init__(self):
        self.bad, self.log = 0, []
    def update(self):
        global calls
        self.bad += 1{{a}}
        self.log.append(self.bad){{b}}
        calls += 1{{c}}
calls = 0
stopper = Stopper()
for step in range(3):
    stopper.update()
    if rank == 1:
        stopper.update() #call
        pass #call
print(stopper.bad, stopper.log, calls)
"""


@pytest.mark.parametrize(
    ("marks", "path", "output"),
    [
        (("#at", "", ""), name("self", "bad"), "3 [1, 2, 2, 3, 3, 4] 6"),
        (("", "#at", ""), name("self", "log"), "6 [1, 3, 5] 6"),
        (("", "", "#at"), name("calls"), "6 [1, 2, 3, 4, 5, 6] 3"),
    ],
)
def test_the_effect_of_an_extra_call_is_undone(
    job: Ranks, marks: tuple[str, str, str], path: object, output: str
) -> None:
    program = LEAK.format(**dict(zip("abc", marks, strict=True)))
    outputs, events = job.run(program, {"kind": "undo", "path": path, "ranks": []})
    assert outputs == ["3 [1, 2, 3] 3", output]
    assert told(events) == [("changed", occurrence, "") for occurrence in (1, 2, 3)]


def test_the_effect_on_a_variable_of_the_calling_function_is_undone(job: Ranks) -> None:
    program = f"""{RANK}
def main():
    count = 0
    def note():
        nonlocal count
        count += 1 #at
    for step in range(3):
        note()
        if rank == 1:
            note() #call
    print(count)
main()
"""
    outputs, events = job.run(program, {"kind": "undo", "path": name("count"), "ranks": []})
    assert outputs == ["3", "3"]
    assert [event["event"] for event in events] == ["changed"] * 3
    outputs, events = job.run(program, {"kind": "undo", "path": name("count"), "ranks": [], "control": True})
    assert (outputs, events) == (["3", "6"], [])


def test_an_attribute_that_an_extra_call_created_is_removed_again(job: Ranks) -> None:
    program = f"""{RANK}
class Cache: pass
cache = Cache()
def fill():
    cache.value = 1 #at
if rank == 1:
    fill() #call
print(hasattr(cache, "value"))
"""
    outputs, _ = job.run(program, {"kind": "undo", "path": name("cache", "value"), "ranks": []})
    assert outputs == ["False", "False"]


def test_a_local_of_the_extra_call_itself_is_no_effect(job: Ranks) -> None:
    program = f"{RANK}\ndef note():\n    x = 1 #at\n    return x\nif rank == 1:\n    note() #call\nprint('end')\n"
    outputs, events = job.run(program, {"kind": "undo", "path": name("x"), "ranks": []})
    assert outputs == ["end", "end"]
    assert told(events) == [("refused", 1, "local to the call")]


def test_the_finalizer_of_a_replaced_object_does_not_run_early(job: Ranks) -> None:
    program = f"""{RANK}
class Noisy:
    def __del__(self):
        print("ran")
items = []
def add():
    items.append(Noisy()) #at
if rank == 1:
    add() #call
print(len(items))
kept = items  # the module of the test outlives its run
"""
    outputs, events = job.run(program, {"kind": "undo", "path": name("items"), "ranks": []})
    assert outputs == ["0", "0"]
    assert told(events) == [("changed", 1, "")]


GENERATOR = f"""{RANK}
import random
random.seed(5)
if rank == 1:
    random.random() #call
draws = []
for step in range(3):
    draws.append(random.random()) #at
print(draws)
"""


@pytest.mark.parametrize("settings", [{"kind": "generator"}, {"kind": "undo", "ranks": []}])
def test_ranks_share_the_state_of_a_generator(job: Ranks, settings: dict[str, Any]) -> None:
    outputs, events = job.run(GENERATOR, settings)
    assert outputs[0] == outputs[1]
    assert (events[0]["event"], events[0]["after"]) == ("changed", "random")
    outputs, events = job.run(GENERATOR, settings | {"control": True})
    assert outputs[0] != outputs[1]
    assert "changed" not in [event["event"] for event in events]


BRANCH = f"""{RANK}
def main():
    out = []
    for step in range(4):
        if rank == {{who}} and step == 2: {{at}}
            break
        out.append(step)
    while len(out) < 2 + 3 * rank:{{loop}}
        out.append(9)
    print(out)
main()
"""


def test_a_rank_takes_the_branch_of_the_reference_rank(job: Ranks) -> None:
    outputs, events = job.run(BRANCH.format(who=0, at="#at", loop=""), {"kind": "branch", "from": 3})
    assert outputs == ["[0, 1]", "[0, 1, 9, 9, 9]"]
    assert told(events) == [("changed", 3, "")]
    outputs, events = job.run(BRANCH.format(who=0, at="#at", loop=""), {"kind": "branch", "from": 3, "control": True})
    assert (outputs[1], [event["event"] for event in events]) == ("[0, 1, 2, 3, 9]", ["refused"])
    outputs, events = job.run(BRANCH.format(who=1, at="#at", loop=""), {"kind": "branch", "from": 3})
    assert outputs == ["[0, 1, 2, 3]", "[0, 1, 2, 3, 9]"]
    assert [event["event"] for event in events] == ["changed", "equal"]


def test_a_rank_leaves_a_loop_with_the_reference_rank(job: Ranks) -> None:
    outputs, events = job.run(BRANCH.format(who=5, at="", loop=" #at"), {"kind": "branch"})
    assert outputs == ["[0, 1, 2, 3]", "[0, 1, 2, 3]"]
    assert told(events) == [("changed", 1, "")]


def test_a_caught_exception_of_one_rank_is_passed_over(job: Ranks) -> None:
    program = f"""{RANK}
def main():
    try:
        text = "" if rank else "1"
        x = int(text) #at
        print("good")
    except ValueError:
        print("bad")
main()
"""
    outputs, events = job.run(program, {"kind": "branch"})
    assert outputs == ["good", "good"]
    assert told(events) == [("changed", 1, "")]


SKIPPED = f"""{RANK}
def load(step):
    value = 1 // (step + rank - 1) #at
    return value
def main():
    for step in range({{steps}}):
        try:
            print(load(step))
        except ArithmeticError:
            print('skipped')
main()
"""


def test_an_exception_of_one_rank_is_raised_on_the_others_after_the_same_statement(job: Ranks) -> None:
    if job.python == sys.executable:
        pytest.skip("Python 3.11 reports nothing more after an exception out of a trace function")
    settings = {"kind": "raise", "error": "ArithmeticError", "handler": 10, "ranks": [0, 1], "from": 2, "after": True}
    outputs, events = job.run(SKIPPED.format(steps=2), settings)
    assert outputs == ["-1\nskipped", "skipped\nskipped"]
    assert told(events) == [("published", 2, ""), ("changed", 2, "")]
    outputs, events = job.run(SKIPPED.format(steps=3), settings | {"from": 3})
    assert outputs == ["-1\nskipped\n1", "skipped\n1\n0"]
    assert told(events) == [("published", 3, ""), ("equal", 3, "")]
    outputs, events = job.run(SKIPPED.format(steps=2), settings | {"control": True})
    assert outputs == ["-1\nskipped", "skipped\n1"]
    assert told(events) == [("published", 2, "")]


def test_an_exception_that_would_not_be_caught_after_a_statement_is_raised_before_it(job: Ranks) -> None:
    if job.python == sys.executable:
        pytest.skip("Python 3.11 reports nothing more after an exception out of a trace function")
    program = f"""{RANK}
for step in range(2):
    try:
        value = 1 // (step + rank) #at
    except ArithmeticError:
        print('skipped')
        continue
    print(value)
"""
    settings = {"kind": "raise", "error": "ArithmeticError", "handler": 7, "ranks": [0, 1]}
    outputs, events = job.run(program, settings)
    assert outputs == ["skipped\n1", "skipped\n0"]
    assert told(events) == [("changed", 1, ""), ("equal", 2, "")]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("for step in range(3):\n    if rank == 1: #at\n        break\nprint('end')\n", "restarts the loop"),
        ("for step in range(2 - rank * 2): #at\n    x = 1\nprint('end')\n", "jump: "),
        ("def f():\n    if rank == 0: #at\n        return 1\n    return 2\nf()\nprint('end')\n", ""),
        ("def f():\n    1 / (1 - rank) #at\n    return\ntry:\n    f()\nexcept Exception:\n    1\nprint('end')\n",
         "the function ended"),
    ],
)  # fmt: skip
def test_a_jump_that_python_cannot_make_is_refused(job: Ranks, program: str, reason: str) -> None:
    outputs, events = job.run(RANK + program, {"kind": "branch"})
    assert outputs == ["end", "end"]
    assert events[0]["event"] == ("refused" if reason else "changed")
    assert events[0]["reason"].startswith(reason)


def test_a_fixed_hash_seed_is_recorded(job: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    outputs, events = job.run("print(list({'a', 'b', 'c', 'd', 'e'})) #at\n", {"kind": "hash_seed"})
    assert outputs[0] == outputs[1]
    assert told(events) == [("changed", 0, "")]


TORCH = f"""{RANK}
import torch, numpy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
class Function(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        print("ran")
        return function(*args, **(kwargs or {{}}))
class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        print("ran")
        return function(*args, **(kwargs or {{}}))
class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        print("ran")
        return super().__torch_function__(function, types, args, kwargs)
weight = torch.ones((), requires_grad=True)
value, loss, mean = torch.tensor(1.0 + rank), weight * (rank + 2), numpy.mean([rank, 4.0])
odd = torch.ones(1).as_subclass(Odd)
torch.manual_seed(rank)
def use():
    with Function(), Dispatch():
        x = 1 #at
        y = 2
    return value, loss, mean
value, loss, mean = use()
print(float(value), float(loss), float(mean), float(torch.rand(())) < 0.5, loss.requires_grad)
"""


@pytest.mark.parametrize(
    ("settings", "output", "told_"),
    [
        ({"kind": "scalar", "path": name("value")}, "1.0 3.0 2.5 False True", ("changed", 1, "")),
        ({"kind": "scalar", "path": name("mean")}, "2.0 3.0 2.0 False True", ("changed", 1, "")),
        ({"kind": "scalar", "path": name("loss")}, "2.0 3.0 2.5 False True", ("refused", 1, "graph")),
        ({"kind": "scalar", "path": name("odd")}, "2.0 3.0 2.5 False True", ("refused", 1, "type")),
        (
            {"kind": "scalar", "path": name("loss"), "temporary": True},
            "2.0 3.0 2.5 False True",
            ("changed", 1, ""),
        ),
        ({"kind": "generator"}, "2.0 3.0 2.5 True True", ("equal", 1, "")),  # the statement does not draw
    ],
)
def test_tensors_are_read_and_replaced_without_the_programs_modes(
    ranks: Ranks, settings: dict[str, Any], output: str, told_: tuple[Any, ...]
) -> None:
    outputs, events = ranks.run(TORCH, settings)
    assert outputs[1].splitlines()[-1] == output
    assert "ran" not in "".join(outputs)
    assert told(events) == [told_]


def test_a_path_of_one_rank_is_given_to_all_but_a_path_of_the_programs_own_class_is_not(job: Ranks) -> None:
    program = f"""{RANK}
from pathlib import Path
class Own(type(Path())):
    pass
folder, own = Path("run") / str(rank), Own("run", str(rank))
x = 1 #at
print(folder, type(folder) is type(Path()), own)
"""
    outputs, events = job.run(program, {"kind": "scalar", "path": name("folder")})
    assert [output.strip() for output in outputs] == ["run/0 True run/0", "run/0 True run/1"]
    assert told(events) == [("changed", 1, "")]
    _, events = job.run(program, {"kind": "scalar", "path": name("own")})
    assert told(events) == [("refused", 1, "type")]


def test_a_tensor_that_an_extra_call_changed_in_place_is_restored(ranks: Ranks) -> None:
    program = f"""{RANK}
import torch
buffer = torch.zeros(3)
def update():
    buffer.add_(1) #at
update()
if rank == 1:
    update() #call
print(buffer.tolist())
"""
    outputs, events = ranks.run(program, {"kind": "undo", "path": name("buffer"), "ranks": []})
    assert outputs[0] == outputs[1]
    assert told(events) == [("changed", 1, "")]


@pytest.mark.parametrize(
    ("maker", "draw"),
    [
        ("random.Random(3)", "g.random()"),
        ("numpy.random.default_rng(3)", "g.random()"),
        ("numpy.random.RandomState(3)", "g.rand()"),
        ("torch.Generator().manual_seed(3)", "torch.rand((), generator=g)"),
    ],
)
def test_the_draws_of_an_extra_call_from_a_generator_of_the_program_are_undone(
    ranks: Ranks, maker: str, draw: str
) -> None:
    program = f"""{RANK}
import random, numpy, torch
g = {maker}
def show():
    print({draw} > 2) #at
if rank == 1:
    show() #call
print(float({draw}))
"""
    outputs, events = ranks.run(program, {"kind": "undo", "path": name("g"), "ranks": []})
    assert outputs[0] == outputs[1].splitlines()[-1]
    assert told(events) == [("changed", 1, "")]


def test_a_generator_of_the_programs_own_class_is_not_touched(ranks: Ranks) -> None:
    program = f"""{RANK}
import random
class Odd(random.Random):
    def getstate(self): print("ran")
    def setstate(self, state): print("ran")
g = Odd(3)
def show():
    g.random() #at
if rank == 1:
    show() #call
print("end")
"""
    outputs, events = ranks.run(program, {"kind": "undo", "path": name("g"), "ranks": []})
    assert outputs == ["end", "end"]
    assert told(events) == [("refused", 1, "type")]
