"""Stores the values of the ranks without secrets, and reads them back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from nsa_harness import protocol
from nsa_harness.core.evidence.frame_values import MAX_BYTES, ProcessValues, parse_values, unquoted, with_texts
from nsa_harness.core.report import Trouble
from nsa_harness.supervisor.storage.adapters import json_text, type_adapter
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import AttemptDir

FILE = "values.json"  # in the directory of each rank


def write_values(attempt: AttemptDir, values: Iterable[ProcessValues]) -> None:
    """Store the values of each rank in its directory, with secrets removed. Raise OSError if that fails."""
    for each in values:
        attempt.directory.make_directory(attempt.rank(each.rank))
        attempt.directory.write(attempt.rank(each.rank) / FILE, json_text(without_secrets(each, attempt.redaction)))


def without_secrets(values: ProcessValues, redaction: Redaction) -> ProcessValues:
    """Return the values with placeholders for secrets. The last part of a name reveals a secret: `config.api_key`."""

    def change(name: str, text: str) -> str:
        content, quote = unquoted(text)
        ((_, clean),) = redaction.pairs([(name.rpartition(".")[2], content)])
        return f"{quote}{redaction.text(clean)}{quote}"

    # The first pass may learn a secret that the name of an earlier value did not reveal.
    return redaction.value(with_texts(with_texts(values, change), change))


def remove_values(attempt: AttemptDir, ranks: int) -> None:
    """Remove the stored values of an earlier moment."""
    for rank in range(ranks):
        with suppress(OSError):
            attempt.directory.remove(attempt.rank(rank) / FILE)


def collect_values(
    attempt: AttemptDir, pids: Mapping[int, int | None], *, is_needed: bool
) -> tuple[tuple[ProcessValues, ...], tuple[Trouble, ...]]:
    """Return the values of all ranks of an attempt, and what could not be read. `pids` maps each rank to its process.

    Values that a rank wrote by itself are stored without secrets, unless values were read from outside before. The
    rank's own file is removed. If values are not `is_needed`, because the attempt passed, nothing is stored.
    """
    found: list[ProcessValues] = []
    trouble: list[Trouble] = []
    for rank, pid in pids.items():
        stored, own = attempt.rank(rank) / FILE, attempt.probe_files / protocol.VALUES.format(pid=pid)
        try:
            if attempt.directory.exists(own):
                data = attempt.directory.read_whole_file(own, MAX_BYTES)
                attempt.directory.remove(own)
                if is_needed and not attempt.directory.exists(stored):
                    write_values(attempt, [parse_values(data, rank)])
            if is_needed and attempt.directory.exists(stored):
                data = attempt.directory.read_whole_file(stored, 2 * MAX_BYTES)
                found.append(type_adapter(ProcessValues).validate_json(data))
        except (OSError, ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            trouble.append(Trouble(what="values", why=why, rank=rank))
    return tuple(each for each in found if each.stacks), tuple(trouble)
