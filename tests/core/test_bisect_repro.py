"""The script of a bisection's repro/: it is Python, says how it is run, and sets up what the probe had."""

from __future__ import annotations

import ast
from dataclasses import replace

from builders import spec

from nsa_harness.core.outcome.reproduction import repro_command, repro_script
from nsa_harness.core.plan import Fault, FaultWhen, Launcher


def _script(**changes: object) -> str:
    made = repro_script(replace(spec(), **changes), working_dir="/job", about='layer 7: "HANG" · model.py:40')
    assert made is not None
    return made


def test_it_says_what_it_shows_and_how_it_is_run():
    text = ast.get_docstring(ast.parse(_script(program=("train.py", "--gc=7"))))
    assert text is not None
    assert text.splitlines()[0] == "layer 7: 'HANG', model.py:40"
    assert repro_command(spec()) in text


def test_words_and_environment_are_those_of_the_probe_whatever_stands_in_them():
    words = ("--gc=7", 'a "b" c', "x" * 80, "y" * 80, "it's")
    text = _script(program=("train.py", *words), env=(("A", "'1'"),))
    tree = ast.parse(text)
    found = next(node.value for node in tree.body if isinstance(node, ast.Assign) and "argv[1:]" in ast.unparse(node))
    assert tuple(ast.literal_eval(found)) == words
    assert "os.environ.update({'A': \"'1'\"})" in text
    assert max(map(len, text.splitlines())) < 130


def test_a_module_is_run_as_one():
    assert "runpy.run_module('pkg.train', run_name='__main__', alter_sys=True)" in _script(program=("-m", "pkg.train"))


def test_a_planted_fault_is_planted_again_and_said_to_be_one():
    fault = Fault(kind="deadlock", rank=1, when=FaultWhen(recomputed=(7,)))
    text = _script(program=("train.py",), fault=fault)
    ast.parse(text)
    assert "planted on purpose" in text
    assert '"recomputed": [7]' in text


def test_a_command_of_the_users_is_no_script():
    assert repro_script(replace(spec(), launcher=Launcher.PLAIN), working_dir="/job", about="") is None
