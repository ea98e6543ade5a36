"""The interface between nsa-harness and the training program that comes with it.

The options of this program are keys of a scenario. Other programs get their options in `run.args`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nsa_harness.core.plan import RunSpec
from nsa_harness.core.report import MachineFacts
from nsa_harness.core.scenario.scenario import Scenario

Location = tuple[str | int, ...]
Contradictions = Iterator[tuple[Location, str]]  # (location of a key, message)

Row = dict[str, float | str]  # one row of a table that the program writes: column -> value, without empty cells
Table = Callable[[str], Sequence[Row] | None]  # returns the rows of the table in a file, or None if there is none
# Returns the metrics that the program reported, and rows for the diagnosis rules of this program.
ReadReported = Callable[[Table], tuple[dict[str, float], tuple[Row, ...]]]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The paths and the source hash of the training program on this machine."""

    python: str
    subject_dir: str  # the directory of the shipped program, which is launched by its path
    content_hash: str  # hash of the program's source; "" for a command or an installed module


@dataclass(frozen=True, kw_only=True)
class OwnProgram:
    """The functions that handle the scenario keys for the training program that comes with nsa-harness.

    `contradictions` yields contradictions that exist on any machine, and `beyond_the_model` those that depend on the
    model chosen for a machine. `missing` returns why a machine cannot run the scenario, or None. `launch` returns the
    spec with the command line filled in.
    """

    contradictions: Callable[[Scenario], Contradictions]
    beyond_the_model: Callable[[Scenario, MachineFacts], Contradictions]
    missing: Callable[[Scenario, MachineFacts], str | None]
    launch: Callable[[RunSpec, Scenario, MachineFacts, Surroundings], RunSpec]
