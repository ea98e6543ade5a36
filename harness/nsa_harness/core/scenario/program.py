"""The seam to the program whose options a scenario spells out: what no other program's launch needs to know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.scenario import Scenario

Location = tuple[str | int, ...]
Contradictions = Iterator[tuple[Location, str]]  # the place of each, and what is wrong

Row = dict[str, float | str]  # of a table that the program writes, by column; a cell that is empty is not there
Table = Callable[[str], Sequence[Row] | None]  # the rows of a file, by its name; None where there is none to read
Reported = Callable[[Table], tuple[dict[str, float], tuple[Row, ...]]]  # metrics, and what rules of its own read


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the caller knows of the place: paths and contents. Paths never reach the spec hash."""

    python: str
    subject_dir: str  # the directory of the program that is ours, launched by path
    content_hash: str  # of the program's source; empty for a command or an installed module


@dataclass(frozen=True, kw_only=True)
class OwnProgram:
    """What is known of the program that reads model, train, gc, parallel and trace. Asked about its scenarios alone."""

    contradictions: Callable[[Scenario], Contradictions]  # on any machine
    beyond_the_model: Callable[[Scenario, MachineFacts], Contradictions]  # with the model that this machine gets
    missing: Callable[[Scenario, MachineFacts], str | None]  # what this machine lacks: the reason of a Skip
    launch: Callable[[RunSpec, Scenario, MachineFacts, Surroundings], RunSpec]  # with its command line filled in
