"""The change of an experiment is written as a patch, or not at all."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nsa_harness.core.recording.explanation import Candidate, ExperimentKind, OriginKind, RankValues
from nsa_harness.core.recording.patch import patch, place_to_change
from nsa_harness.core.report import Place

PROGRAM = """\
import torch

def train(stopper, loader):
    for step, batch in enumerate(loader):
        val = validate(batch)
        if val > stopper.best:
            stopper.bad += 1
        elif val < 0:
            return
        preview(loader)
        if stopper.bad >= 3 and (
            step > 1
        ):
            break
        torch.manual_seed(step)
        stopper.update(val)
        while val > 3:
            val = val / 2
        for name in names: print(name)
class Stopper:
    def update(self, val):
        self.bad += 1
"""
FILE = "/own/src/train.py"


def candidate(kind: OriginKind, line: int, name: str = "", *texts: str, **more: Any) -> Candidate:
    values = (RankValues(name=name, values=tuple(enumerate(texts))),)
    place = Place(file=FILE, line=line, function=more.pop("function", "train"))
    return Candidate(place=place, kind=kind, ranks=(1,), name=name, values=values, **more)


def changed(
    kind: ExperimentKind, line: int, name: str = "", origin: Candidate | None = None, text: str = PROGRAM
) -> str | None:
    """The lines that a patch removes and adds."""
    place = place_to_change(kind, Place(file=FILE, line=line), origin)
    diff = patch(kind, place, name, origin, text, "/own")
    if diff is None:
        return None
    assert diff.startswith("--- a/src/train.py\n+++ b/src/train.py\n@@ ")
    return "".join(line for line in diff.splitlines(keepends=True)[3:] if line[0] in "+-")


def test_a_value_is_shared_after_the_statement_that_sets_it_and_before_one_that_uses_it() -> None:
    shared = (
        "+            shared = [stopper.bad]\n+            torch.distributed.broadcast_object_list(shared, src=0)\n"
        "+            stopper.bad = shared[0]\n"
    )
    assert changed(ExperimentKind.SET_VALUE, 7, "stopper.bad") == shared
    assert changed(ExperimentKind.SET_VALUE, 11, "stopper.bad") == shared.replace("            ", "        ")
    assert (changed(ExperimentKind.SET_VALUE, 4, "batch") or "").startswith("+        shared = [batch]\n")


@pytest.mark.parametrize(
    ("kind", "texts", "result"),
    [
        (OriginKind.MISSING_REDUCTION, ("0.5", "1.5"), "val = sum(shared) / len(shared)"),
        (OriginKind.MISSING_REDUCTION, ("True", "False"), "val = any(shared)"),
        (OriginKind.LENGTH, ("17", "18"), "val = min(shared)"),
        (OriginKind.MISSING_REDUCTION, ("3", "4"), "val = shared[0]"),
        (OriginKind.CLOCK, ("0.5", "1.5"), "val = shared[0]"),
    ],
)
def test_a_value_is_reduced_as_its_kind_needs(kind: OriginKind, texts: tuple[str, ...], result: str) -> None:
    lines = changed(ExperimentKind.SET_VALUE, 5, "val", candidate(kind, 5, "val", *texts)) or ""
    assert lines.splitlines()[-1] == f"+        {result}"


def test_a_generator_is_shared_before_a_draw_and_after_a_seed() -> None:
    drawn = changed(ExperimentKind.SHARE_GENERATOR, 2, "random", text="import random\nx = random.random()\n") or ""
    assert drawn.startswith("+import torch.distributed\n+shared = [random.getstate()]\n")
    diff = patch(ExperimentKind.SHARE_GENERATOR, Place(file=FILE, line=15), "torch", None, PROGRAM) or ""
    assert " torch.manual_seed(step)\n+        shared = [torch.get_rng_state()]\n" in diff.replace(
        "         torch", " torch"
    )


def test_the_effect_of_an_extra_call_is_removed_where_it_is_called() -> None:
    leak = candidate(OriginKind.LEAK, 22, "self.bad", caller=Place(file=FILE, line=16), function="Stopper.update")
    assert changed(ExperimentKind.UNDO_LEAK, 22, "self.bad", leak) == (
        "+        kept = stopper.bad\n+        stopper.bad = kept\n"
    )
    here = candidate(OriginKind.LEAK, 10, "loader.count")
    assert changed(ExperimentKind.UNDO_LEAK, 10, "loader.count", here) == (
        "+        kept = loader.count\n+        loader.count = kept\n"
    )
    drawn = candidate(OriginKind.LEAK, 10, "generator:torch")
    assert changed(ExperimentKind.UNDO_LEAK, 10, "torch", drawn) == (
        "+        kept = torch.get_rng_state()\n+        torch.set_rng_state(kept)\n"
    )


def test_a_branch_is_taken_as_rank_0_takes_it() -> None:
    assert changed(ExperimentKind.FORCE_BRANCH, 11) == (
        "-        if stopper.bad >= 3 and (\n-            step > 1\n-        ):\n"
        "+        shared = [bool(stopper.bad >= 3 and ( step > 1 ))]\n"
        "+        torch.distributed.broadcast_object_list(shared, src=0)\n"
        "+        if shared[0]:\n"
    )


def test_a_set_is_sorted() -> None:
    assert changed(ExperimentKind.FIX_HASH_SEED, 19) == (
        "-        for name in names: print(name)\n+        for name in sorted(names): print(name)\n"
    )


def test_the_programs_own_names_are_used_and_kept() -> None:
    text = "import torch.distributed as dist\nshared = 1\nx = shared\n"
    assert changed(ExperimentKind.SET_VALUE, 3, "x", text=text) == (
        "+shared_value = [x]\n+dist.broadcast_object_list(shared_value, src=0)\n+x = shared_value[0]\n"
    )
    documented = '"""A program."""\nfrom __future__ import annotations\nx = 1\n'
    lines = changed(ExperimentKind.SET_VALUE, 3, "x", text=documented) or ""
    assert lines.startswith("+import torch.distributed\n")


@pytest.mark.parametrize(
    ("kind", "line", "name"),
    [
        (ExperimentKind.FORCE_BRANCH, 8, ""),
        (ExperimentKind.FORCE_BRANCH, 4, ""),
        (ExperimentKind.SET_VALUE, 7, "stopper.<locals>"),
        (ExperimentKind.SET_VALUE, 7, ""),
        (ExperimentKind.SET_VALUE, 8, "stopper.bad"),
        (ExperimentKind.SET_VALUE, 17, "val"),
        (ExperimentKind.SET_VALUE, 19, "name"),
        (ExperimentKind.UNDO_LEAK, 11, "stopper.bad"),
        (ExperimentKind.SET_VALUE, 99, "stopper.bad"),
    ],
)
def test_what_cannot_be_written_as_a_patch_is_not(kind: ExperimentKind, line: int, name: str) -> None:
    assert changed(kind, line, name) is None
    assert changed(kind, line, name, text="if this is: no python") is None


def test_a_patch_can_be_applied(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for kind, line, name in (
        (ExperimentKind.FORCE_BRANCH, 11, ""),
        (ExperimentKind.SET_VALUE, 18, "val"),
        (ExperimentKind.SET_VALUE, 5, "val"),
    ):
        (tmp_path / "src" / "train.py").write_text(PROGRAM)
        diff = patch(kind, Place(file=FILE, line=line), name, None, PROGRAM, "/own")
        assert diff is not None
        subprocess.run(["git", "apply"], input=diff, text=True, cwd=tmp_path, check=True)
        compile((tmp_path / "src" / "train.py").read_text(), "train.py", "exec")
