"""The interface to our own program. Its options are keys of a scenario; other programs get theirs in run.args."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.scenario import Scenario

Location = tuple[str | int, ...]
Contradictions = Iterator[tuple[Location, str]]  # (location of a key, message)

Row = dict[str, float | str]  # one row of a table that the program writes, by column; an empty cell is missing
Table = Callable[[str], Sequence[Row] | None]  # the rows of a file, by its name; None if there are none
Reported = Callable[[Table], tuple[dict[str, float], tuple[Row, ...]]]  # metrics, and rows for the program's own rules


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Paths and contents known to the caller. Paths never reach the spec hash."""

    python: str
    subject_dir: str  # the directory of our own program, launched by path
    content_hash: str  # hash of the program's source; empty for a command or an installed module


@dataclass(frozen=True, kw_only=True)
class OwnProgram:
    """The functions by which our own program handles its keys: model, train, gc, parallel and trace."""

    contradictions: Callable[[Scenario], Contradictions]  # on any machine
    beyond_the_model: Callable[[Scenario, MachineFacts], Contradictions]  # given the model chosen for this machine
    missing: Callable[[Scenario, MachineFacts], str | None]  # the reason of a Skip if this machine lacks something
    launch: Callable[[RunSpec, Scenario, MachineFacts, Surroundings], RunSpec]  # with its command line filled in
