"""The recording of a program: its statements, with their values, calls, exceptions and random draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from recorder_runs import PYTHONS, in_function, record, trouble, values

COUNTER = """
import random

class Stopper:
    def __init__(self, patience):
        self.patience = patience
        self.bad = 0

    def step(self, value):
        if value > 0.5:
            self.bad += 1
        return self.bad >= self.patience

def numbers(count):
    for number in range(count):
        yield number

def main():
    stopper = Stopper(2)
    random.seed(0)
    for number in numbers(3):
        value = random.random()
        if stopper.step(
            value
        ):
            break
    try:
        int("x")
    except ValueError as error:
        text = str(error)
    return [stopper.step(0) for _ in range(2)]

main()
"""


@pytest.fixture(params=PYTHONS, ids=["3.11", "3.12", "3.13"])
def python(request: pytest.FixtureRequest) -> str:
    if not Path(request.param).exists():
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


def test_statements_are_recorded_with_their_values_and_calls(python: str, tmp_path: Path) -> None:
    (recording,) = record(python, COUNTER, tmp_path)
    assert not recording.problems
    assert recording.python == tuple(
        map(int, subprocess.check_output([python, "-V"], text=True).split()[1].split(".")[:2])
    )
    main = in_function(recording, "main")
    assert [execution.line for execution in main][:8] == [19, 20, 21, 22, 23, 21, 22, 23]
    step = next(execution for execution in main if execution.line == 23)
    (call,) = step.calls
    assert call.function == "Stopper.step"
    assert call.ended
    assert call.returned is not None
    assert call.returned.text == "False"
    increments = [one for one in in_function(recording, "Stopper.step") if one.line == 11]
    assert [values(one.writes)["self.bad"] for one in increments] == ["1", "2"]
    stopper = next(value for name, value in main[0].writes if name == "stopper")
    assert stopper.type == "Stopper"
    assert stopper.identity == next(value for name, value in increments[0].reads if name == "self").identity
    draw = next(execution for execution in main if execution.line == 22)
    assert [draw[0] for draw in draw.draws] == ["random"]
    assert [call.function for call in main[2].calls] == ["numbers"]
    raised = next(execution.raised for execution in main if execution.line == 28)
    assert raised is not None
    assert (raised.type, raised.handled) == ("ValueError", True)
    assert [call.function for call in main[-1].calls] == ["Stopper.step"] * 2


def test_a_recording_without_values_has_none(python: str, tmp_path: Path) -> None:
    (recording,) = record(python, COUNTER, tmp_path, {"values": False})
    main = in_function(recording, "main")
    assert [execution.line for execution in main][:8] == [19, 20, 21, 22, 23, 21, 22, 23]
    assert not any(execution.reads or execution.writes for execution in main)


PARTS = {
    "with": (
        """
class Context:
    def __enter__(self):
        return self
    def __exit__(self, *error):
        return True
def main():
    with Context() as context:
        raise KeyError("gone")
    done = 1
main()
""",
        [("main", [8, 9, 8, 10])],
    ),
    "while": (
        """
def main():
    n = 0
    while True:
        n += 1
        if n == 3: break
    for i in range(2): n += i
    while n < 9:
        n += 3
main()
""",
        [("main", [3, 4, 5, 6, 4, 5, 6, 4, 5, 6, 7, 8, 9, 8, 9, 8])],
    ),
    "long statement": (
        """
def add(a, b):
    return a + b
def main():
    total = add(
        1,
        add(
            2,
            3,
        ),
    )
    items = [
        add(i, 1)
        for i in range(3)
        if i
    ]
    return (total +
            len(items))
main()
""",
        [("main", [5, 12, 17])],
    ),
    "while true": (
        """
def main():
    it = iter(range(3))
    try:
        while True:
            next(it)
    except StopIteration:
        pass
main()
""",
        [("main", [3, 4, 5, 6, 5, 6, 5, 6, 5, 6, 7, 8])],
    ),
    "match": (
        """
def main(x):
    match x:
        case 1:
            y = 1
        case [a, b]:
            y = a
    return y
main([1, 2])
""",
        [("main", [3, 4, 6, 7, 8])],
    ),
    "coroutine": (
        """
import asyncio
async def child(n):
    await asyncio.sleep(0)
    return n
async def main():
    one = await child(1)
    two = await asyncio.gather(child(2), child(3))
    return two
asyncio.run(main())
""",
        [("main", [7, 8, 9]), ("child", [4, 5, 4, 5, 4, 5])],
    ),
    "closed generator": (
        """
def numbers():
    try:
        for i in range(9):
            yield i
    finally:
        end = 1
def main():
    for i in numbers():
        break
    x = 1
main()
""",
        [("numbers", [3, 4, 5, 7]), ("main", [9, 10, 11])],
    ),
    "decorator": (
        """
import functools
def wrap(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    return inner
@wrap
def main(x):
    return x
main(1)
""",
        [("main", [10]), ("wrap.<locals>.inner", [6])],
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_each_execution_of_a_statement_is_recorded_once(python: str, tmp_path: Path, name: str) -> None:
    program, functions = PARTS[name]
    (recording,) = record(python, program, tmp_path)
    for function, lines in functions:
        assert [execution.line for execution in in_function(recording, function)] == lines
    assert trouble(tmp_path) == []


def test_a_killed_process_leaves_its_recording(python: str, tmp_path: Path) -> None:
    program = """
import os, signal
def main():
    x = 5
    os.kill(os.getpid(), signal.SIGKILL)
main()
"""
    (recording,) = record(python, program, tmp_path, returns=-9)
    last = in_function(recording, "main")[-1]
    assert last.line == 5
    assert recording.threads[0].activations[0].executions[-1].calls[0].ended is False


def test_a_forked_process_has_a_recording_of_its_own(python: str, tmp_path: Path) -> None:
    program = """
import os
def child():
    y = 2
def main():
    x = 1
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    os.waitpid(pid, 0)
    z = 3
main()
"""
    parent, child = record(python, program, tmp_path)
    assert [execution.line for execution in in_function(parent, "main")] == [6, 7, 8, 11, 12]
    assert [execution.line for execution in in_function(child, "child")] == [4]
    assert trouble(tmp_path) == []


def test_a_process_that_is_spawned_has_a_recording_of_its_own(python: str, tmp_path: Path) -> None:
    program = """
import multiprocessing
def child(n):
    y = n
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child, args=(3,))
    process.start()
    process.join()
"""
    recordings = record(python, program, tmp_path)
    assert any(values(one.writes) == {"y": "3"} for each in recordings for one in in_function(each, "child"))


def test_each_thread_is_recorded(python: str, tmp_path: Path) -> None:
    program = """
import threading
def work(n):
    for i in range(200):
        n += i
    return n
threads = [threading.Thread(target=work, args=(k,), name=f"worker-{k}") for k in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    (recording,) = record(python, program, tmp_path)
    assert recording.threads[0].name == "MainThread"
    assert sorted(thread.name for thread in recording.threads[1:]) == [f"worker-{k}" for k in range(4)]
    for thread in recording.threads[1:]:
        (activation,) = thread.activations
        assert len(activation.executions) == 402
        assert activation.ended


def test_what_runs_very_often_is_recorded_only_at_first(python: str, tmp_path: Path) -> None:
    program = """
def small(x):
    return x
def main():
    n = 0
    for i in range(40000):
        n = small(i)
    after = n
main()
"""
    (recording,) = record(python, program, tmp_path)
    main = in_function(recording, "main")
    assert sum(execution.line == 7 for execution in main) == 30_000
    assert sum(execution.line == 7 and execution.has_values for execution in main) == 3000
    assert values(main[-1].writes) == {"after": "39999"}
    (activation,) = [call for execution in recording.threads[0].activations[0].executions for call in execution.calls]
    assert activation.is_truncated


def test_the_program_sees_its_own_variables(python: str, tmp_path: Path) -> None:
    program = """
class Base:
    def __init__(self, **options):
        self.options = options
class Config(Base):
    def __init__(self, size, name):
        options = locals()
        for key in ("self", "__class__"):
            options.pop(key, None)
        extra = 1
        super().__init__(**options)
config = Config(3, "a")
assert config.options == {"size": 3, "name": "a"}, config.options
def outer():
    kept = locals()
    x = 1
    y = 2
    return kept
assert outer() == {}, outer()
"""
    (recording,) = record(python, program, tmp_path)
    not_recorded = ("Config.__init__ calls locals()", "outer calls locals()") if python == sys.executable else ()
    assert recording.problems == not_recorded


def test_values_do_not_live_longer(python: str, tmp_path: Path) -> None:
    program = """
import weakref
class Thing: pass
def main():
    thing = Thing()
    seen = weakref.ref(thing)
    use = thing
    del use
    thing = None
    x = 1
    return seen()
assert main() is None
"""
    record(python, program, tmp_path)


def test_an_exception_of_a_signal_handler_reaches_the_program(python: str, tmp_path: Path) -> None:
    program = """
import signal
class Timeout(Exception): pass
def stop(number, frame):
    raise Timeout
signal.signal(signal.SIGALRM, stop)
def main():
    caught = 0
    for _ in range(20):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            while True:
                x = 1
                y = [x, x]
        except Timeout:
            caught += 1
    return caught
assert main() == 20
"""
    record(python, program, tmp_path)


def test_a_program_that_traces_itself_is_not_disturbed(tmp_path: Path) -> None:
    program = """
import sys
lines = []
def trace(frame, event, argument):
    lines.append(event)
    return trace
def main():
    x = 1
    return x
sys.settrace(trace)
main()
sys.settrace(None)
assert lines == ["call", "line", "line", "return"], lines
"""
    (recording,) = record(sys.executable, program, tmp_path)
    assert any("sys.settrace" in problem for problem in recording.problems)
    assert any("sys.settrace" in error for error in trouble(tmp_path))


def test_the_recorder_steps_aside_for_another_tool(python: str, tmp_path: Path) -> None:
    is_new = python != sys.executable
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        + (
            "for n in (2, 3, 4, 5): sys.monitoring.use_tool_id(n, 'tool')"
            if is_new
            else "sys.settrace(lambda *_: None)"
        )
    )
    program = "x = 1\n"
    assert record(python, program, tmp_path, path=str(tmp_path)) == []
    assert any("another tool" in error or "other tools" in error for error in trouble(tmp_path))
