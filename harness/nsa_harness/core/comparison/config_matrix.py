"""A table of the runs in a report, arranged by their settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from nsa_harness.core.comparison.contrasts import configuration, is_number, setting
from nsa_harness.core.comparison.hypotheses import is_our_program
from nsa_harness.core.report import Outcome

# These keys form the columns; all others form the rows.
_COLUMN_KEYS = frozenset({"parallel.wrapper", "run.ranks", "backend", "device"})
PLAIN = "plain"
_MOST_COLUMNS = 8


@dataclass(frozen=True, kw_only=True)
class MatrixRow:
    """A row of a table of runs, in which each cell contains the runs of one configuration."""

    name: str
    cells: tuple[tuple[Outcome, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ConfigMatrix:
    """A table of runs, arranged by their settings."""

    columns: tuple[str, ...]
    rows: tuple[MatrixRow, ...]
    same: tuple[tuple[str, str], ...]  # (key, value) of the settings that all runs have in common, without defaults


def config_matrix(outcomes: Sequence[Outcome]) -> ConfigMatrix | None:
    """Return a table of the runs, arranged by their settings, or None if there are fewer than two runs.

    Each column is one kind of parallelism (wrapper, backend and number of ranks). If all runs have the same
    parallelism, the columns are the values of another setting. Each row is one combination of the remaining settings.
    """
    final_runs = sorted((outcome for outcome in outcomes if outcome.final), key=_order)
    if len(final_runs) < 2:
        return None
    common = _shared_settings(final_runs)
    pivot = _pivot(final_runs, common) if len(set(map(_column_name, final_runs))) == 1 else None
    hidden = {*_COLUMN_KEYS, *common, *([pivot] if pivot else [])}
    cells: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in final_runs:
        column = f"{pivot}={setting(outcome, pivot)}" if pivot else _column_name(outcome)
        cells.setdefault((_row_name(outcome, hidden), column), []).append(outcome)
    columns = tuple(sorted({column for _, column in cells}, key=lambda name: (name != _ONE_PROCESS, _by_size(name))))
    names = sorted({name for name, _ in cells}, key=_row_order)
    rows = (
        MatrixRow(name=name, cells=tuple(tuple(cells.get((name, column), ())) for column in columns)) for name in names
    )
    return ConfigMatrix(columns=columns, rows=tuple(rows), same=tuple(sorted(common.items())))


def _pivot(outcomes: Sequence[Outcome], common: Mapping[str, str]) -> str | None:
    """Return the setting whose values, used as the columns, make the table as short as possible.

    `common` are the settings that all runs share. Returns None if no setting fits.
    """
    keys = sorted({key for outcome in outcomes for key in configuration(outcome)} - _COLUMN_KEYS - set(common))
    candidates = [key for key in keys if 1 < len({setting(outcome, key) for outcome in outcomes}) <= _MOST_COLUMNS]
    lengths = {
        key: len({_row_name(outcome, {*_COLUMN_KEYS, *common, key}) for outcome in outcomes}) for key in candidates
    }
    return min(candidates, key=lambda key: (lengths[key], key), default=None)


_ONE_PROCESS = "one process"


def _shared_settings(outcomes: Sequence[Outcome]) -> Mapping[str, str]:
    common = set.intersection(*(set(configuration(outcome).items()) for outcome in outcomes))
    return {key: value for key, value in common if key not in _COLUMN_KEYS}


def _row_name(outcome: Outcome, hidden: Collection[str]) -> str:
    settings = [f"{key}={value}" for key, value in sorted(configuration(outcome).items()) if key not in hidden]
    return " · ".join(settings) or PLAIN


def _column_name(outcome: Outcome) -> str:
    """Return a column name such as "ddp · gloo" or "fsdp · nccl · 4 ranks"."""
    wrapper, ranks = setting(outcome, "parallel.wrapper"), setting(outcome, "run.ranks")
    backend = setting(outcome, "backend").replace("any", "")
    if not is_our_program(outcome):
        return " · ".join(word for word in (f"{ranks} ranks", backend) if word)
    if wrapper == "none" and ranks == "1":
        return _ONE_PROCESS
    return " · ".join(word for word in (wrapper, backend, "" if ranks == "2" else f"{ranks} ranks") if word)


def _order(outcome: Outcome) -> tuple[object, ...]:
    return outcome.spec.scenario, outcome.attempt, outcome.spec.spec_hash, outcome.dir


def _row_order(name: str) -> tuple[object, ...]:
    """Return a sort key that puts rows with fewer settings first."""
    return 0 if name == PLAIN else name.count(" · ") + 1, _by_size(name)


def _by_size(text: str) -> list[tuple[int, str]]:
    """Return a sort key that puts "T 128" before "T 1024"."""
    return [(int(part), "") if is_number(part) else (-1, part) for part in re.split(r"([0-9]{1,15})", text)]
