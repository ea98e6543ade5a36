"""The log of sentences: every claim, advice and open point that the tests of the core make the package say.

    python tests/frozen/sentence_log.py            write sentence_shapes.jsonl anew; takes a minute
    python tests/frozen/sentence_log.py --check    only compare with it

It runs tests/core and tests/frozen and listens where findings are made, whoever makes them. Two texts have the same
shape if they differ only in numbers and paths. A line is a cause with one shape, shown by the first of its texts in
alphabetical order. A rewrite of the rules that keeps every line also keeps those
sentences that no frozen judgement holds.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
SHAPES = HERE / "sentence_shapes.jsonl"
TESTS = ("tests/core", "tests/frozen")
_LOG = "SENTENCE_LOG"  # the file to write, given to the process of the tests
_PATH = re.compile(
    r"(?<![\w/])[~\w./+-]*\w\.(?:py|json|jsonl|txt|sh|yaml|log|html|so)\b(?::\d+)?|(?<!\w)(?:/[\w.+-]+)+"
)
_NUMBER = re.compile(r"0x[0-9a-f]+|(?<![A-Za-z_])\d+(?:\.\d+)?(?:e[+-]?\d+)?")

heard: set[tuple[str, str, str]] = set()  # cause, part of the finding, text


def shape(text: str) -> str:
    return _NUMBER.sub("#", _PATH.sub("PATH", text))


def lines() -> Iterator[str]:
    """One line for each cause and shape that was heard, sorted."""
    examples: dict[tuple[str, str, str], str] = {}
    for cause, part, text in sorted(heard, reverse=True):
        examples[cause, part, shape(text)] = text
    for (cause, part, _), text in sorted(examples.items()):
        yield json.dumps({"cause": cause, "part": part, "text": text}, ensure_ascii=False)


def pytest_configure() -> None:
    """Listen to every finding and every answer of a rule that the package makes, and to none that a test makes."""
    from nsa_harness.core.diagnosis.explanation import Explanation
    from nsa_harness.core.report import Finding

    package = Finding.__module__.partition(".")[0]
    _listen(Finding, _hear_finding, package)
    _listen(Explanation, _hear_explanation, package)


def _listen(kind: Any, hear: Callable[[Any], None], package: str) -> None:
    make = kind.__init__

    @wraps(make)
    def listening(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if _maker(sys._getframe(1)).partition(".")[0] == package:
            hear(self)

    kind.__init__ = listening


def _hear_finding(finding: Any) -> None:
    heard.update((finding.code, "claim", text) for text in [finding.claim] if text)
    heard.update((finding.code, "advice", text) for text in [finding.advice] if text)
    heard.update((finding.code, "left_open", text) for text in finding.left_open)


def _hear_explanation(answer: Any) -> None:
    """Make the sentences of an answer, which the diagnosis may not choose."""
    from jinja2 import UndefinedError

    from nsa_harness.texts.causes import LEFT_OPEN, remedy
    from nsa_harness.texts.templates import render_template

    code = answer.cause.value
    facts = {
        **answer.facts,
        "ranks": answer.ranks,
        "rank": next(iter(answer.ranks), None),
        "place": answer.place,
        "step": answer.step,
        "remedy": remedy(code),
    }
    try:
        claim, advice = render_template(code, "claim", facts), render_template(code, "advice", facts)
    except UndefinedError:  # `stated` makes one without facts, to get its confidence
        return
    heard.add((code, "claim", claim))
    heard.update((code, "advice", text) for text in [advice] if text)
    questions = answer.open_questions
    heard.update(
        (code, "left_open", render_template(LEFT_OPEN, question.code, question.facts)) for question in questions
    )


def _maker(frame: FrameType) -> str:
    """The module that makes the finding, or replaces a part of it."""
    while frame.f_globals.get("__name__") == "dataclasses" and frame.f_back:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def pytest_sessionfinish() -> None:
    Path(os.environ[_LOG]).write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")


def _run_tests() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        paths = os.pathsep.join([str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).strip(os.pathsep)
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, *TESTS]
        environment = {**os.environ, "PYTHONPATH": paths, _LOG: str(log)}
        done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"the tests fail, so their sentences do not count\n{done.stdout[-3000:]}{done.stderr}")
        return log.read_text(encoding="utf-8").splitlines()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Log the sentences of the tests of the core.")
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if a line differs")
    options = parser.parse_args(arguments)
    before = SHAPES.read_text(encoding="utf-8").splitlines() if SHAPES.exists() else []
    now = _run_tests()
    changed = list(difflib.unified_diff(before, now, "frozen", "today", n=0, lineterm=""))
    if not options.check:
        SHAPES.write_text("".join(f"{line}\n" for line in now), encoding="utf-8")
    print("\n".join([*changed, f"{len(now)} shapes; {'they differ' if changed else 'the same as before'}"]))
    return 1 if changed and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
