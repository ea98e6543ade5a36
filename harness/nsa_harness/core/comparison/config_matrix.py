"""Configuration matrix: which configurations were run, and which were not."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from nsa_harness.core.comparison.contrasts import configuration, is_number, setting
from nsa_harness.core.comparison.hypotheses import takes_our_keys
from nsa_harness.core.report import Outcome

# These keys form the columns; all others form the rows.
_ACROSS = frozenset({"parallel.wrapper", "run.ranks", "backend", "device"})
PLAIN = "plain"
_MOST_COLUMNS = 8


@dataclass(frozen=True, kw_only=True)
class MatrixRow:
    """A row. A cell has the runs of one configuration; an empty cell was not run."""

    name: str
    cells: tuple[tuple[Outcome, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ConfigMatrix:
    columns: tuple[str, ...]
    rows: tuple[MatrixRow, ...]
    same: tuple[tuple[str, str], ...]  # what all runs have in common apart from the defaults


def config_matrix(outcomes: Sequence[Outcome]) -> ConfigMatrix | None:
    """Return the matrix; None if fewer than two runs count."""
    counting = sorted((one for one in outcomes if one.final), key=_order)
    if len(counting) < 2:
        return None
    same = _common(counting)
    pivot = _pivot(counting, same) if len(set(map(_across, counting))) == 1 else None
    hidden = {*_ACROSS, *same, *([pivot] if pivot else [])}
    cells: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in counting:
        column = f"{pivot}={setting(outcome, pivot)}" if pivot else _across(outcome)
        cells.setdefault((_down(outcome, hidden), column), []).append(outcome)
    columns = tuple(sorted({column for _, column in cells}, key=lambda name: (name != _ALONE, _by_size(name))))
    names = sorted({name for name, _ in cells}, key=_row_order)
    rows = (
        MatrixRow(name=name, cells=tuple(tuple(cells.get((name, column), ())) for column in columns)) for name in names
    )
    return ConfigMatrix(columns=columns, rows=tuple(rows), same=tuple(sorted(same.items())))


def _pivot(outcomes: Sequence[Outcome], same: Mapping[str, str]) -> str | None:
    """Return the setting that makes the shortest table as columns, for runs that agree in the usual column keys."""
    keys = sorted({key for outcome in outcomes for key in configuration(outcome)} - _ACROSS - set(same))
    fitting = [key for key in keys if 1 < len({setting(outcome, key) for outcome in outcomes}) <= _MOST_COLUMNS]
    lengths = {key: len({_down(outcome, {*_ACROSS, *same, key}) for outcome in outcomes}) for key in fitting}
    return min(fitting, key=lambda key: (lengths[key], key), default=None)


_ALONE = "one process"


def _common(outcomes: Sequence[Outcome]) -> Mapping[str, str]:
    shared = set.intersection(*(set(configuration(outcome).items()) for outcome in outcomes))
    return {key: value for key, value in shared if key not in _ACROSS}


def _down(outcome: Outcome, hidden: Collection[str]) -> str:
    told = [f"{key}={value}" for key, value in sorted(configuration(outcome).items()) if key not in hidden]
    return " · ".join(told) or PLAIN


def _across(outcome: Outcome) -> str:
    """Return the column's name: "one process", "ddp · gloo", "fsdp · nccl · 4 ranks"."""
    wrapper, ranks = setting(outcome, "parallel.wrapper"), setting(outcome, "run.ranks")
    backend = setting(outcome, "backend").replace("any", "")
    if not takes_our_keys(outcome):
        return " · ".join(word for word in (f"{ranks} ranks", backend) if word)
    if wrapper == "none" and ranks == "1":
        return _ALONE
    return " · ".join(word for word in (wrapper, backend, "" if ranks == "2" else f"{ranks} ranks") if word)


def _order(outcome: Outcome) -> tuple[object, ...]:
    """Return a total order, so that the order of the outcomes changes nothing."""
    return outcome.spec.scenario, outcome.attempt, outcome.spec.spec_hash, outcome.dir


def _row_order(name: str) -> tuple[object, ...]:
    """Return an order with the simplest row first."""
    return 0 if name == PLAIN else name.count(" · ") + 1, _by_size(name)


def _by_size(text: str) -> list[tuple[int, str]]:
    """Return an order of numbers by size and of words by the alphabet."""
    return [(int(part), "") if is_number(part) else (-1, part) for part in re.split(r"([0-9]{1,15})", text)]
