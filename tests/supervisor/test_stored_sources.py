"""The program's source that is kept beside its evidence."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from attempts import clean, spec

from nsa_harness.core.evidence.evidence import Frame, RaisedException
from nsa_harness.supervisor.storage.collect import collect
from nsa_harness.supervisor.storage.sources import edited_sources, with_sources

PROGRAM = """
def publish(board):
    board.set("ready", "1")

def count(seen):
    seen.add("ready")

def wait(store):
    return store.get("ready")
"""


def test_who_sets_keys_is_kept_beside_the_functions_that_the_evidence_names(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    seen = collect(clean(tmp_path / "attempt"), spec(), "n")
    frames = (Frame(file=str(program), line=9, function="wait"),)
    error = RaisedException(rank=1, at_s=1.0, type="DistStoreError", message="", frames=frames, proof="")
    seen = replace(seen, ranks=(replace(seen.ranks[0], exception=error),))
    kept = with_sources(clean(tmp_path / "attempt"), seen, launched_here=True).sources
    other = replace(seen, ranks=(replace(seen.ranks[0], exception=replace(error, type="ValueError")),))
    assert [one.first for one in with_sources(clean(tmp_path / "other"), other, launched_here=True).sources] == [8], (
        "nobody waits for a key"
    )
    assert [(one.first, one.text.splitlines()[0]) for one in kept] == [
        (2, "def publish(board):"),
        (8, "def wait(store):"),
    ]


def test_of_a_job_that_was_found_only_what_stood_there_when_it_was_started_is_its_source(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    hour_ago_s = time.time() - 3600.0
    os.utime(program, (hour_ago_s, hour_ago_s))
    frames = (Frame(file=str(program), line=9, function="wait"),)
    error = RaisedException(rank=1, at_s=1.0, type="ValueError", message="", frames=frames, proof="")

    def kept(name: str, running_for_s: float, *, attached: bool) -> int:
        seen = collect(clean(tmp_path / name), spec(), "n")
        seen = replace(
            seen, ranks=(replace(seen.ranks[0], exception=error),), ended_s=running_for_s, is_attached=attached
        )
        return len(with_sources(clean(tmp_path / name), seen, launched_here=True).sources)

    assert kept("edited after the start", 7200.0, attached=True) == 0
    assert kept("as it was started", 1800.0, attached=True) == 1
    assert kept("of our own, by its spec alone", 7200.0, attached=False) == 1


def test_a_source_that_is_newer_than_the_job_is_named(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    frames = (
        Frame(file=str(program), line=9, function="wait"),
        Frame(file=f"{tmp_path}/gone.py", line=1, function="f"),
    )
    error = RaisedException(rank=1, at_s=1.0, type="ValueError", message="", frames=frames, proof="")
    seen = collect(clean(tmp_path / "attempt"), spec(), "n")
    seen = replace(seen, ranks=(replace(seen.ranks[0], exception=error),), ended_s=60.0, is_attached=True)
    (note,) = edited_sources(seen, time.time() - 60.0, "the log")
    assert (note.what, note.why) == ("train.py", "newer than the log, so no condition in it is shown")
    assert list(edited_sources(seen, time.time() + 60.0, "the log")) == []
    assert note.what in {one.what for one in with_sources(clean(tmp_path / "a"), seen, launched_here=True).trouble}
