"""What a second run of nsa.train can do otherwise through its own command line, and what follows from how it ends."""

from __future__ import annotations

from nsa_harness.core.comparison.deepening import ANOMALY, FOLLOWS, PASSED, SAME, Change, Follows
from nsa_harness.core.diagnosis.causes import SecondRun
from nsa_harness.core.plan import RunSpec
from nsa_harness.subject.files import is_launched_by

_VANILLA = "vanilla"
WHAT_FOLLOWS: Follows = {
    **FOLLOWS,
    (_VANILLA, PASSED): "so the fault lies in NSA's attention",
    (_VANILLA, SAME): "so it does not need NSA's attention",
}


def second_runs(spec: RunSpec) -> tuple[Change, ...]:
    """None of another program's launch."""
    if not is_launched_by(spec):
        return ()
    words = spec.program
    switched = tuple("--detect-anomaly" if word == "--no-detect-anomaly" else word for word in words)
    anomaly = Change(name=ANOMALY.name, says=ANOMALY.says, program=switched, setting=("trace.detect_anomaly", "true"))
    gloo = Change(
        name=SecondRun.OTHER_BACKEND,
        says="gloo in place of nccl",
        program=_with(words, "--backend", "nccl", "gloo"),
        backend="gloo",
        setting=("needs.backend", "gloo"),
    )
    every_branch = _with(words, "--branch", "all", "") != words
    vanilla = Change(
        name=_VANILLA,
        says="vanilla attention",
        program=_with(words, "--attention", "nsa", "vanilla") if every_branch else words,
        setting=("model.attention", "vanilla"),
    )
    return anomaly, gloo, vanilla


def _with(words: tuple[str, ...], option: str, old: str, new: str) -> tuple[str, ...]:
    """The command line with another value of that option, where it has this one."""
    pairs = zip(("", *words), words, strict=False)
    return tuple(new if (before, word) == (option, old) else word for before, word in pairs)
