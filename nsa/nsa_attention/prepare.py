"""The command that tokenizes text into token files for training.

Usage: `python -m nsa_attention.prepare shards/ --out tokens`, then `--data tokens`.

Each shard becomes one part in the directory OUT.partial. When all parts are finished, the directory is renamed to OUT,
so a directory OUT is always complete. If the program is killed, the same command continues with the unfinished parts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, TextIO

from .data.maps import META
from .data.prefetch import OrderedPrefetch
from .data.problems import BadRecordError, BadShardError, DataProblems
from .data.shards import FileShard, Record, Shard
from .data.source_shards import shards_for
from .data.tokens import Tokenizer, Tokens, tokenizer_named
from .options import Option, SettingsError, add_options, parse_values
from .values import BadShards, Data, data_source, one_of, tokenizer_source, whole
from .world import CannotRunError

BATCH_RECORDS = 256
REDRAW_INTERVAL_S = 0.2
BAR_WIDTH = 24


@dataclass(frozen=True, kw_only=True)
class Part:
    """The record of a finished token file: its shard, its tokenizer, and the numbers of tokens and documents."""

    file: str
    source: str
    tokenizer: str
    tokens: int
    documents: int


@dataclass(frozen=True, kw_only=True)
class PrepareRequest:
    """The validated arguments of the command `nsa.prepare`."""

    inputs: tuple[Any, ...]
    out: Path
    tokenizer: str
    text_field: str
    bad_shards: BadShards
    workers: int


OPTIONS = (
    Option(
        name="tokenizer",
        parse=tokenizer_source,
        default="bytes",
        about="bytes, a tokenizer.json, or a .tiktoken file such as r50k_base.tiktoken (default: bytes)",
    ),
    Option(name="text_field", parse=str, default="text", about="field or column with the text (default: text)"),
    Option(
        name="bad_shards",
        parse=one_of(BadShards),
        default=BadShards.STOP,
        about="if data cannot be read: stop, or skip and count it (default: stop)",
    ),
    Option(name="workers", parse=whole(0), default=2, about="number of tokenizer threads (default: 2)"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `nsa.prepare`, and return its exit code.

    The code is 0 after success, 2 if the arguments are wrong or the texts cannot be used, and 130 after Ctrl-C.
    """
    try:
        request = _read_request(sys.argv[1:] if arguments is None else arguments)
        prepare(request, Progress(sys.stderr))
    except (SettingsError, CannotRunError) as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"nsa.prepare: error: {line}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\nnsa.prepare: interrupted; run the same command again to continue\n")
        return 130
    return 0


def prepare(request: PrepareRequest, progress: Progress) -> None:
    """Tokenize all shards into token files in a new output directory.

    Raises CannotRunError if the directory exists already, or if texts cannot be read or tokens cannot be written.
    Finished parts are kept and reused by the next call.
    """
    tokenizer = tokenizer_named(request.tokenizer)
    shards = [shard for source in request.inputs for shard in shards_for(source, request.text_field)]
    if request.out.exists():
        raise CannotRunError(f"--out {request.out}: already exists; remove it, or choose another directory")
    partial = request.out.with_name(request.out.name + ".partial")
    problems = DataProblems(request.bad_shards)
    progress.begin(shards)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        parts = [
            _write_part(partial, number, shard, tokenizer, request.workers, problems, progress)
            for number, shard in enumerate(shards)
        ]
        _finish(partial, request.out, [part for part in parts if part is not None], tokenizer, problems)
    except OSError as error:
        raise CannotRunError(f"--out {request.out}: cannot be written ({error.strerror})") from error
    progress.end(request.out, problems)


def _write_part(
    folder: Path,
    number: int,
    shard: Shard,
    tokenizer: Tokenizer,
    workers: int,
    problems: DataProblems,
    progress: Progress,
) -> Part | None:
    """Tokenize a shard into a file, and return the file's description, or None if the shard has no text."""
    # The part is finished when its JSON record exists. If the record of an earlier run matches the shard and the
    # tokenizer, the part is not written again.
    path = folder / f"train_{number:05d}.bin"
    record = path.with_suffix(".json")
    empty_part = Part(file=path.name, source=shard.identity(), tokenizer=tokenizer.name, tokens=0, documents=0)
    existing = _read_record(record)
    if existing is not None and replace(existing, tokens=0, documents=0) == empty_part:
        progress.skip(shard, existing)
        return existing if existing.tokens else None
    record.unlink(missing_ok=True)
    tokens = documents = 0
    with path.open("wb") as file:
        for document in _documents(shard, tokenizer, workers, problems, progress):
            file.write(document.astype(f"<u{tokenizer.dtype().itemsize}").tobytes())
            tokens, documents = tokens + len(document), documents + 1
            progress.advance(len(document))
        file.flush()
        os.fsync(file.fileno())
    if not tokens:
        path.unlink()
        problems.shard(shard.name, "contains no text")
    part = replace(empty_part, tokens=tokens, documents=documents)
    _write_atomically(record, asdict(part))
    progress.finish(shard, part)
    return part if tokens else None


def _documents(
    shard: Shard, tokenizer: Tokenizer, workers: int, problems: DataProblems, progress: Progress
) -> Iterator[Tokens]:
    def tokenize(batch: tuple[int, list[Record]]) -> list[Tokens]:
        first, records = batch
        documents = []
        for number, record in enumerate(records, first + 1):
            if isinstance(record, BadRecordError):
                problems.record(f"{shard.name}, record {number}", str(record))
            elif record:
                documents.append(tokenizer.document(record))
        return documents

    batches = OrderedPrefetch(
        _batches(shard, problems, progress), tokenize, workers=workers, ahead=8, name="nsa-prepare"
    )
    try:
        for batch in batches:
            yield from batch
    finally:
        batches.close()


def _batches(shard: Shard, problems: DataProblems, progress: Progress) -> Iterator[tuple[int, list[Record]]]:
    source = replace(shard, on_open=progress.on_open) if isinstance(shard, FileShard) else shard
    records, first = source.records(), 0
    while True:
        batch: list[Record] = []
        problem = None
        try:
            batch.extend(islice(records, BATCH_RECORDS))
        except BadShardError as error:
            problem = str(error)
        if batch:
            yield first, batch
            first += len(batch)
        if problem is not None:
            problems.shard(shard.name, problem)
        if problem is not None or len(batch) < BATCH_RECORDS:
            return


def _finish(partial: Path, out: Path, parts: Sequence[Part], tokenizer: Tokenizer, problems: DataProblems) -> None:
    if not parts:
        raise CannotRunError(f"no document in the shards; {problems.sentence()}")
    meta = {
        "format": 1,
        "dtype": tokenizer.dtype.__name__,
        "vocab": tokenizer.vocab,
        "end": tokenizer.end,
        "tokenizer": tokenizer.name,
        "parts": [asdict(part) for part in parts],
        **problems.summary(),
    }
    _write_atomically(partial / META, meta)
    needed_names = {META, *(part.file for part in parts)}
    for path in partial.iterdir():
        if path.name not in needed_names:
            path.unlink()
    partial.rename(out)


def _read_record(record: Path) -> Part | None:
    try:
        return Part(**json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # there is no valid record, so the part is written again


def _write_atomically(path: Path, content: dict[str, Any]) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


class Progress:
    """The progress output: a line per finished shard and, on a terminal, a progress bar."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._redrawn_s, self._started_s = stream, 0.0, time.monotonic()
        self._is_terminal = stream.isatty()
        self._sizes: list[int] = []
        self._finished = self._tokens = 0
        self._file: IO[bytes] | None = None

    def begin(self, shards: Sequence[Shard]) -> None:
        self._sizes = [_size(shard) for shard in shards]

    def on_open(self, file: IO[bytes]) -> None:
        self._file = file

    def advance(self, tokens: int) -> None:
        self._tokens += tokens
        if self._is_terminal and time.monotonic() - self._redrawn_s > REDRAW_INTERVAL_S:
            self._redrawn_s = time.monotonic()
            self._stream.write("\r" + self.line() + "\x1b[K")
            self._stream.flush()

    def line(self) -> str:
        """Return the progress bar as a line of text."""
        share = self._share()
        full = int(share * BAR_WIDTH)
        speed = self._tokens / max(1e-9, time.monotonic() - self._started_s)
        bar = "#" * full + "." * (BAR_WIDTH - full)
        shards = f"shard {min(self._finished + 1, len(self._sizes))} of {len(self._sizes)}"
        return f"[{bar}] {share:4.0%}  {shards}  {self._tokens:,} tokens  {speed:,.0f}/s"

    def skip(self, shard: Shard, part: Part) -> None:
        self._finish_shard(f"{shard.name}: finished earlier, {part.tokens:,} tokens")

    def finish(self, shard: Shard, part: Part) -> None:
        self._finish_shard(f"{shard.name}: {part.documents:,} documents, {part.tokens:,} tokens")

    def end(self, out: Path, problems: DataProblems) -> None:
        self._print(f"{out}: {self._finished} shards in {time.monotonic() - self._started_s:.1f} s")
        if sentence := problems.sentence():
            self._print(sentence)

    def _finish_shard(self, text: str) -> None:
        self._finished, self._file = self._finished + 1, None
        self._print(text)

    def _print(self, text: str) -> None:
        self._stream.write(("\r\x1b[K" if self._is_terminal else "") + f"nsa.prepare: {text}\n")
        self._stream.flush()

    def _share(self) -> float:
        total = sum(self._sizes)
        if not total:
            return self._finished / max(1, len(self._sizes))
        try:
            within = self._file.tell() if self._file is not None else 0
        except ValueError:
            within = 0  # a worker thread has closed the file
        return min(1.0, (sum(self._sizes[: self._finished]) + within) / total)


def _size(shard: Shard) -> int:
    try:
        return shard.path.stat().st_size if isinstance(shard, FileShard) else 0
    except OSError:
        return 0


def text_source(text: str) -> Any:
    """Parse a value of `--data`. Raise ValueError if the data source does not consist of text."""
    source = data_source(text)
    if source is Data.SYNTHETIC:
        raise ValueError("expected texts; synthetic data consists of tokens")
    return source


def _read_request(arguments: Sequence[str]) -> PrepareRequest:
    raw_values = vars(_parser().parse_args(arguments))
    mistakes: list[str] = []
    inputs = []
    for text in raw_values["inputs"]:
        try:
            inputs.append(text_source(text))
        except ValueError as error:
            mistakes.append(f"input: {error}")
    values = parse_values(OPTIONS, raw_values, mistakes)
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return PrepareRequest(inputs=tuple(inputs), out=Path(raw_values["out"]), **values)


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog=f"python -m {__package__}.prepare",
        description="Tokenize texts into files for nsa.train.",
        epilog="After an interruption, the same command continues. nsa.train --data OUT trains on the result.",
    )
    result.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="texts: a file, a directory or a glob pattern of .txt, .jsonl (both also .gz, .zst) or .parquet files, "
        "stories, text, or hf:PATH[:CONFIG[:SPLIT]]",
    )
    result.add_argument("--out", required=True, help="output directory, which must not exist")
    add_options(result, OPTIONS)
    return result


if __name__ == "__main__":
    sys.exit(main())
