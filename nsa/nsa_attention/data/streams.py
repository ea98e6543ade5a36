"""Rows of tokens from a shuffled stream of documents.

Shards are shuffled, and the documents of a shard are shuffled in blocks. Every rank reads the whole stream and uses its
own rows, so the order does not depend on the number of ranks or workers.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np

from ..world import CannotRunError
from .packing import Cursor, Row, rows
from .prefetch import OrderedPrefetch
from .problems import BadRecordError, BadShardError, DataProblems
from .shards import Record, Shard
from .tokens import Tokenizer, Tokens

# Number of consecutive records that are shuffled together. A worker tokenizes one such block at a time.
BLOCK = 256
BLOCKS_AHEAD = 4
SLOW_S = 5.0


@dataclass(frozen=True, kw_only=True, order=True)
class Place:
    """The position of a document in the stream.

    `shard` is the index in the epoch's shuffled order of shards. `block` counts the shard's blocks of BLOCK records, in
    file order. `document` is the index in the block's shuffled order of documents.
    """

    epoch: int = 0
    shard: int = 0
    block: int = 0
    document: int = 0


_BlockDocuments = list[tuple["Place", Tokens]]  # the documents of one block


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A block of up to BLOCK consecutive records of a shard."""

    place: Place
    records: Sequence[Record]
    shard: int  # index in the unshuffled list of shards
    name: str


class DocumentStream:
    """A data source that packs a stream of documents into rows and can save its position."""

    documents = True

    def __init__(
        self,
        shards: Sequence[Shard],
        tokenizer: Tokenizer,
        problems: DataProblems,
        *,
        length: int,
        seed: int,
        workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shards, self._tokenizer, self._problems = shards, tokenizer, problems
        self._length, self._seed, self._workers, self._clock = length, seed, workers, clock
        self._cursor: Cursor[Place] = Cursor(Place(), 0)
        self._blocks: OrderedPrefetch[_Block | None, _BlockDocuments | None] | None = None
        self._rows: Iterator[tuple[Row, Cursor[Place]]] | None = None

    def identity(self) -> dict[str, Any]:
        names = "\n".join(shard.identity() for shard in self._shards)
        return {
            "shards": len(self._shards),
            "shards_digest": hashlib.sha256(names.encode()).hexdigest()[:16],
            "tokenizer": self._tokenizer.name,
            "seq_len": self._length,
        }

    def position(self) -> dict[str, Any]:
        place = self._cursor.place
        return {
            "epoch": place.epoch,
            "shard": place.shard,
            "block": place.block,
            "document": place.document,
            "token": self._cursor.token,
        }

    def go_to(self, position: dict[str, Any]) -> None:
        self.close()
        self._cursor = Cursor(
            Place(**{name: int(position[name]) for name in ("epoch", "shard", "block", "document")}),
            int(position["token"]),
        )

    def next_row(self) -> Row:
        """Return the next row of tokens. A new epoch starts when all shards have been read.

        Raises CannotRunError if no shard has a document, or if the settings say that bad shards stop the run.
        """
        if self._rows is None:
            self._start()
        assert self._rows is not None
        row, self._cursor = next(self._rows)
        return row

    def close(self) -> None:
        """Stop the worker threads."""
        if self._blocks is not None:
            self._blocks.close()
        self._blocks = self._rows = None

    def _start(self) -> None:
        begin = self._cursor
        blocks = self._blocks = OrderedPrefetch(
            self._read(begin.place), self._tokens, workers=self._workers, ahead=BLOCKS_AHEAD, name="nsa-loader"
        )
        self._rows = rows(self._documents(blocks, begin.place), self._length, begin.token)

    def _documents(self, blocks: Iterator[_BlockDocuments | None], begin: Place) -> Iterator[tuple[Place, Tokens]]:
        """Yield the documents from `begin` on. Raise CannotRunError after an epoch without a token."""
        has_tokens = begin != Place()
        for block in blocks:
            if block is None and not has_tokens:
                problems = self._problems.sentence() or "every text has 0 tokens"
                raise CannotRunError(f"--data: no document in {len(self._shards)} shards; {problems}")
            has_tokens = block is not None and (has_tokens or any(len(tokens) for _, tokens in block))
            yield from (document for document in block or () if document[0] >= begin)

    def _read(self, begin: Place) -> Iterator[_Block | None]:
        """Yield blocks of records endlessly, starting with the block that contains document `begin`.

        None marks the end of each epoch.
        """
        for epoch in count(begin.epoch):
            order = self._generator(epoch).permutation(len(self._shards))
            for place in range(begin.shard if epoch == begin.epoch else 0, len(order)):
                location = Place(epoch=epoch, shard=place)
                block = begin.block if (epoch, place) == (begin.epoch, begin.shard) else 0
                yield from self._read_shard(int(order[place]), location, block)
            yield None

    def _read_shard(self, number: int, location: Place, block: int) -> Iterator[_Block]:
        shard = self._shards[number]
        records = islice(shard.records(), block * BLOCK, None)
        empty = block == 0
        while True:
            batch, problem = self._next_records(records, shard.name)
            if batch:
                place = Place(epoch=location.epoch, shard=location.shard, block=block)
                yield _Block(place=place, records=batch, shard=number, name=shard.name)
                empty = empty and not any(isinstance(record, str) and record for record in batch)
                block += 1
            if problem is not None:
                self._problems.shard(shard.name, problem)
            if problem is not None or len(batch) < BLOCK:
                break
        if empty and problem is None:
            self._problems.shard(shard.name, "contains no text")

    def _next_records(self, records: Iterator[Record], name: str) -> tuple[list[Record], str | None]:
        """Return up to BLOCK records of shard `name`, and an error message if the rest of the shard cannot be read."""
        batch: list[Record] = []
        started_s = self._clock()
        try:
            for record in islice(records, BLOCK):
                batch.append(record)
        except BadShardError as error:
            return batch, str(error)
        finally:
            if (seconds := self._clock() - started_s) > SLOW_S:
                self._problems.slow(name, seconds)
        return batch, None

    def _tokens(self, block: _Block | None) -> _BlockDocuments | None:
        """Return the position and tokens of each usable document in a block, in shuffled order.

        The result is None if `block` is None, which marks the end of an epoch.
        """
        if block is None:
            return None
        order = self._generator(block.place.epoch, block.shard, block.place.block).permutation(len(block.records))
        texts = [text for number in order if (text := self._text_or_report(block, int(number)))]
        location = block.place
        return [
            (
                Place(epoch=location.epoch, shard=location.shard, block=location.block, document=document),
                self._tokenizer.document(text),
            )
            for document, text in enumerate(texts)
        ]

    def _text_or_report(self, block: _Block, number: int) -> str | None:
        record = block.records[number]
        if isinstance(record, BadRecordError):
            self._problems.record(f"{block.name}, record {block.place.block * BLOCK + number + 1}", str(record))
            return None
        return record

    def _generator(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *numbers])
