"""Stores the recordings of ranks without secrets, and reads them back.

A stored recording is a gzip file in the directory of its rank, in the format of protocol.py. Each string is
stored once and is redacted once.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from nsa_harness import protocol
from nsa_harness.core.recording.judgement import ExperimentEvent, read_events
from nsa_harness.core.recording.reading import (
    NotARecordingError,
    numbers_of,
    read_child,
    read_children,
    read_recording,
    records,
)
from nsa_harness.core.recording.recording import RankRecording
from nsa_harness.core.report import Trouble
from nsa_harness.core.secret_names import required_of
from nsa_harness.supervisor.storage.redaction import Redaction
from nsa_harness.supervisor.storage.rundir import AttemptDir

RECORDING_FILE = "recording.gz"
CHILD_FILE = "recording-{pid}.gz"  # of a child process of the rank, such as a DataLoader worker
RECORDINGS = "rank*/recording*.gz"  # both, of all ranks of an attempt
_MOST_CHILDREN = 32  # recordings of child processes that are kept for each rank, the latest
EXPERIMENT_FILE = "experiment.jsonl"
_MOST_BYTES = protocol.RECORDING_LIMIT + (1 << 20)
_CHUNK_STRINGS = 2000
_FIRST_VALUE = {protocol.RECORD_ENTER: 4, protocol.RECORD_EXECUTE: 4, protocol.RECORD_WRITES: 1}
_LAST_NAME = re.compile(r"\w+(?=\W*$)")


def store_recordings(attempt: AttemptDir, pids: Mapping[int, int | None]) -> tuple[Trouble, ...]:
    """Store the recordings of each rank and of its children in its directory, with secrets removed.

    Return one note per failure.

    `pids` has the process of each rank, or None. The original files, which contain secrets, are removed.
    """
    sources = {path.stem: path for path in attempt.directory.list_files(attempt.probe_files, "*.record")}
    notes = []
    parents = dict(
        _parents(attempt, {pid: path for pid, path in sources.items() if pid not in map(str, pids.values())})
    )
    for rank, pid in pids.items():
        source = sources.get(str(pid))
        wanted = {RECORDING_FILE: source} if source is not None else {}
        own = (pid for pid, parent in parents.items() if parent == pids[rank])
        wanted |= {CHILD_FILE.format(pid=child): sources[child] for child in sorted(own, key=int)[-_MOST_CHILDREN:]}
        for name, path in wanted.items():
            try:
                data = redacted(attempt.directory.read_whole_file(path, _MOST_BYTES), attempt.redaction)
                attempt.directory.make_directory(attempt.rank(rank))
                _write(attempt, attempt.rank(rank) / name, data)
            except (OSError, ValueError) as error:
                notes.append(Trouble(what="recording", why=f"it could not be stored: {error}", rank=rank))
    for source in sources.values():
        try:
            attempt.directory.remove(source)
        except OSError as error:
            notes.append(Trouble(what=source.name, why=f"it could not be removed: {error}"))
    return tuple(notes)


def _parents(attempt: AttemptDir, sources: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    """Yield the process of each recording that can be read, with the process that started it."""
    for pid, path in sources.items():
        with suppress(OSError, NotARecordingError), attempt.directory.open_file(path) as file:
            yield pid, read_child(file.read(protocol.RECORDING_HEADER_SIZE))[1]


def redact_recordings(attempt: AttemptDir) -> Iterator[Trouble]:
    """Remove secrets that were found later from the stored recordings. Yield one note per failure."""
    for path in attempt.directory.list_files(attempt.path, RECORDINGS):
        try:
            data = _read(attempt, path)
            clean = redacted(data, attempt.redaction)
            if clean != data:
                _write(attempt, path, clean)
        except (OSError, ValueError) as error:
            yield Trouble(what=path.name, why=f"it could not be redacted: {error}")


def load_recordings(attempt: AttemptDir, ranks: int) -> tuple[list[RankRecording], tuple[Trouble, ...]]:
    """Return the stored recordings of an attempt, and a note for each rank whose recording is missing or damaged."""
    recordings, notes = [], []
    for rank in range(ranks):
        try:
            recording = read_recording(_read(attempt, attempt.rank(rank) / RECORDING_FILE), rank)
            children = attempt.directory.list_files(attempt.rank(rank), CHILD_FILE.format(pid="*"))
            recording.children = read_children([_read(attempt, path) for path in children], rank)
        except FileNotFoundError:
            notes.append(Trouble(what="recording", why="there is none", rank=rank))
        except (OSError, ValueError) as error:
            notes.append(Trouble(what="recording", why=f"it could not be read: {error}", rank=rank))
        else:
            recordings.append(recording)
            notes += [Trouble(what="recording", why=problem, rank=rank) for problem in recording.problems]
    return recordings, tuple(notes)


def load_experiment_events(attempt: AttemptDir, ranks: int) -> tuple[ExperimentEvent, ...]:
    """Return what the experiment of an attempt changed, found equal or refused in each rank."""
    files = (attempt.rank(rank) / EXPERIMENT_FILE for rank in range(ranks))
    return tuple(event for file in files for event in read_events(attempt.directory.read_records(file)))


def redacted(data: bytes, redaction: Redaction) -> bytes:
    """Return a recording in which all strings are redacted, and also the values of names such as `password`.

    Raise NotARecordingError if `data` is not a recording.
    """
    header = data[: protocol.RECORDING_HEADER_SIZE]
    if len(header) < protocol.RECORDING_HEADER_SIZE or header[:8] != protocol.RECORDING_MAGIC:
        raise NotARecordingError("no header")
    strings, others = [], []
    for _, kind, body in records(data):
        if kind == protocol.RECORD_STRING:
            strings.append(body.decode("utf-8", "replace"))
        else:
            others.append((kind, body))
    functions = _function_names(others)
    named_texts = [(name, text) for kind, body in others for _, name, text in _named_texts(kind, body, functions)]
    secrets = _named_secrets(strings, dict.fromkeys(named_texts), redaction)
    clean = _redact_strings(strings, redaction)
    shown_elsewhere = {text for name, text in named_texts if (name, text) not in secrets} if secrets else set()
    for number in {text for _, text in secrets} - shown_elsewhere:
        clean[number] = ""
    numbers = {pair: len(clean) + at for at, pair in enumerate(secrets)}
    result = [header]
    result += [_record(protocol.RECORD_STRING, text.encode("utf-8", "replace")) for text in [*clean, *secrets.values()]]
    result += [
        _record(kind, _without_secrets(kind, body, functions, numbers) if numbers else body) for kind, body in others
    ]
    return b"".join(result)


def _record(kind: int, body: bytes) -> bytes:
    if kind < 0:  # a record that is cut off: its reader must notice this again
        return protocol.RECORD_HEAD.pack(1 << 30, 1)
    return protocol.RECORD_HEAD.pack(len(body), kind) + body + bytes(-len(body) & 7)


def _function_names(others: list[tuple[int, bytes]]) -> dict[int, int]:
    """Return the string of the function's name for each activation."""
    codes: dict[int, int] = {}
    functions: dict[int, int] = {}
    for kind, body in others:
        if kind == protocol.RECORD_CODE and len(body) == 32:
            number, _, codes[number], _ = numbers_of(body)
        elif kind == protocol.RECORD_ENTER and len(body) >= 32 and not len(body) % 8:
            activation, code, *_ = numbers_of(body[:16])
            functions[activation] = codes.get(code, 0)
    return functions


def _named_secrets(
    strings: list[str], pairs: Iterable[tuple[int, int]], redaction: Redaction
) -> dict[tuple[int, int], str]:
    """Return the redacted text for each pair of a name and a text whose text is a secret because of its name."""
    suspicious = {
        number: match[0]
        for number, text in enumerate(strings)
        if (match := _LAST_NAME.search(text)) and required_of(match[0]) is not None
    }
    result = {}
    for name, text in pairs:
        if name in suspicious and 0 <= text < len(strings):
            value = strings[text]
            quote = value[:1] if value[:1] in ("'", '"') and value[:1] == value[-1:] else ""
            plain = value[len(quote) : len(value) - len(quote)]
            ((_, clean),) = redaction.value({suspicious[name]: plain}).items()
            if clean != plain:
                result[name, text] = f"{quote}{clean}{quote}"
    return result


def _named_texts(kind: int, body: bytes, functions: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield the position of the text, the name and the text for each value in a record.

    The name of a result is that of its function.
    """
    first = _FIRST_VALUE.get(kind)
    if kind == protocol.RECORD_LEAVE and len(body) == 40:
        activation, _, _, text, _ = numbers_of(body)
        yield 3, functions.get(activation, 0), text
    elif first is not None and not len(body) % 8:
        numbers = numbers_of(body)
        for at in range(first, len(numbers) - 3, 4):
            yield at + 2, numbers[at], numbers[at + 2]


def _without_secrets(
    kind: int, body: bytes, functions: Mapping[int, int], numbers: Mapping[tuple[int, int], int]
) -> bytes:
    changes = [
        (at, numbers[name, text]) for at, name, text in _named_texts(kind, body, functions) if (name, text) in numbers
    ]
    if not changes:
        return body
    result = bytearray(body)
    for at, number in changes:
        result[8 * at : 8 * at + 8] = number.to_bytes(8, "little")
    return bytes(result)


def _redact_strings(strings: list[str], redaction: Redaction) -> list[str]:
    """Return the strings without secrets. Many strings are redacted as one text, which is much faster."""
    clean: list[str] = []
    for start in range(0, len(strings), _CHUNK_STRINGS):
        chunk = strings[start : start + _CHUNK_STRINGS]
        lines = redaction.text("\n".join(chunk)).split("\n")
        clean += lines if len(lines) == len(chunk) else [redaction.text(text) for text in chunk]
    return clean


def _write(attempt: AttemptDir, path: Path, data: bytes) -> None:
    with attempt.directory.replace_file(path) as file:
        file.write(gzip.compress(data, compresslevel=6, mtime=0))


def _read(attempt: AttemptDir, path: Path) -> bytes:
    """Return the bytes of a stored recording. Raise OSError or ValueError if it is damaged or too large."""
    packed = attempt.directory.read_whole_file(path, _MOST_BYTES)
    try:
        unpacking = zlib.decompressobj(wbits=31)
        data = unpacking.decompress(packed, 2 * _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"damaged: {error}") from None
    if not unpacking.eof:
        raise ValueError("damaged or too large")
    return data
