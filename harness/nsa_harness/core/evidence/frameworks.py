"""Find where a thread is inside a framework that runs the program's training, such as lightning or transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from nsa_harness.core.evidence.evidence import Frame
from nsa_harness.core.evidence.stacks import is_library, is_machinery, package_of

# Functions of frameworks that only call others, so their names say nothing about the phase.
_DISPATCHERS = ("call", "run", "wrap", "inner", "decorate", "dispatch", "invoke")


def framework_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the frames of installed packages except torch, outermost first, that the innermost program line called."""
    inside = list(takewhile(lambda frame: is_library(frame.file), frames))
    return tuple(frame for frame in reversed(inside) if package_of(frame.file) and not is_machinery(frame.file))


@dataclass(frozen=True, kw_only=True)
class FrameworkPosition:
    """Where a thread is inside a framework that the program called."""

    called_at: Frame  # the program's line that called the framework
    package: str  # name of the framework's package
    frame: Frame  # the program's function that the framework called, or else the framework's own function
    in_program: bool  # `frame` is the program's


def framework_positions(frames: Sequence[Frame]) -> list[FrameworkPosition]:
    """Return where a thread is inside frameworks, outermost first, from its frames, innermost first."""
    own = [at for at, frame in enumerate(frames) if not is_library(frame.file) and not frame.file.startswith("<")]
    positions = []
    for inner, at in reversed([*zip([-1, *own], own, strict=False)]):
        inside = framework_frames(frames[inner + 1 : at])
        if inside:
            frame = frames[inner] if inner >= 0 else phase_frame(inside) or inside[-1]
            package = package_of(inside[0].file)
            positions.append(
                FrameworkPosition(called_at=frames[at], package=package, frame=frame, in_program=inner >= 0)
            )
    return positions


def phase_frame(inside: Sequence[Frame]) -> Frame | None:
    """Return the innermost of these frames, outermost first, whose function names a hook, or else a phase, or None."""
    own = [frame for frame in reversed(inside) if package_of(frame.file) == package_of(inside[0].file)]
    names = [(frame.function.rpartition(".")[2], frame) for frame in own]
    hooks = (frame for name, frame in names if name.startswith("on_"))
    phases = (frame for name, frame in names if not name.startswith(("_", "<", *_DISPATCHERS)))
    return next(hooks, None) or next(phases, None)
