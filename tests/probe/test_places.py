"""The line of the program that a stack shows, whatever it has called."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from nsa_harness.probe.places import innermost_own

STANDARD = os.path.join(os.path.dirname(os.__file__), "random.py")
PACKAGE = "/usr/lib/python3.11/site-packages/trainer/loop.py"
TRAIN, TORCH = "/ada/train.py", "/torch/nn.py"


def stack_of(*files: str) -> SimpleNamespace | None:
    """The innermost of frames in these files, each called from the one before it."""
    frame = None
    for file in files:
        frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_back=frame)
    return frame


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ((TRAIN, TORCH), TRAIN),
        ((TRAIN, PACKAGE, STANDARD), TRAIN),
        ((TRAIN, PACKAGE, "/ada/hook.py", STANDARD), "/ada/hook.py"),
        ((PACKAGE, STANDARD, TORCH), STANDARD),
    ],
    ids=["torch", "a package and the standard library", "called back", "nothing of the program's own"],
)
def test_the_innermost_line_of_the_program_itself_is_shown_where_there_is_one(
    files: tuple[str, ...], shown: str
) -> None:
    assert innermost_own(stack_of(*files), ("/torch/",)).f_code.co_filename == shown


def test_of_frames_that_are_all_foreign_none_is_shown() -> None:
    assert innermost_own(stack_of(TORCH), ("/torch/",)) is None
