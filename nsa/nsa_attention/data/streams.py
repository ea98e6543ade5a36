"""Rows of documents that are read one after the other: shards shuffled, and inside of each the documents near together.

Every rank reads the whole stream and takes its rows: the order is one, whatever the number of ranks and workers.
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
from .prefetch import Ordered
from .shards import Record, Shard
from .tokens import Tokenizer, Tokens
from .trouble import BadRecordError, BadShardError, Trouble

# So many records in a row are shuffled together, and are what a worker turns into tokens at once.
BLOCK = 256
BLOCKS_AHEAD = 4
SLOW_S = 5.0


class _NoDocumentError(Exception):
    """No shard has a document. Workers may still be reporting what is wrong with the records."""


@dataclass(frozen=True, kw_only=True, order=True)
class Place:
    """A document: the so manieth of a block, of a shard, of an epoch, each in its shuffled order."""

    epoch: int = 0
    shard: int = 0
    block: int = 0
    document: int = 0


_Documents = list[tuple["Place", Tokens]]  # of a block


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Records as they stand in their shard."""

    place: Place
    records: Sequence[Record]
    shard: int  # by name
    name: str


class Documents:
    """The rows of a stream, from a position on."""

    documents = True

    def __init__(
        self,
        shards: Sequence[Shard],
        tokenizer: Tokenizer,
        trouble: Trouble,
        *,
        length: int,
        seed: int,
        workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shards, self._tokenizer, self._trouble = shards, tokenizer, trouble
        self._length, self._seed, self._workers, self._clock = length, seed, workers, clock
        self._cursor: Cursor[Place] = Cursor(Place(), 0)
        self._blocks: Ordered[_Block, list[tuple[Place, Tokens]]] | None = None
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
        """Raises CannotRunError where a bad shard stops the run, or no shard has a document."""
        if self._rows is None:
            self._start()
        assert self._rows is not None
        row, self._cursor = next(self._rows)
        return row

    def close(self) -> None:
        """The workers end."""
        if self._blocks is not None:
            self._blocks.close()
        self._blocks = self._rows = None

    def _start(self) -> None:
        begin = self._cursor
        blocks = self._blocks = Ordered(
            self._read(begin.place), self._tokens, workers=self._workers, ahead=BLOCKS_AHEAD, name="nsa-loader"
        )
        documents = (
            document for block in self._reporting_none(blocks) for document in block if document[0] >= begin.place
        )
        self._rows = rows(documents, self._length, begin.token)

    def _reporting_none(self, blocks: Iterator[_Documents]) -> Iterator[_Documents]:
        """Yield the blocks. Raises CannotRunError if no shard has a document, once all earlier blocks were read."""
        try:
            yield from blocks
        except _NoDocumentError:
            sentence = self._trouble.sentence()
            raise CannotRunError(f"--data: no document in {len(self._shards)} shards; {sentence}") from None

    def _read(self, begin: Place) -> Iterator[_Block]:
        """All blocks from that of a document on, without end."""
        for epoch in count(begin.epoch):
            order = self._generator(epoch).permutation(len(self._shards))
            first = begin.shard if epoch == begin.epoch else 0
            found = first > 0
            for place in range(first, len(order)):
                at = Place(epoch=epoch, shard=place)
                block = begin.block if (epoch, place) == (begin.epoch, begin.shard) else 0
                for one in self._read_shard(int(order[place]), at, block):
                    found = found or any(isinstance(record, str) for record in one.records)
                    yield one
            if not found:
                raise _NoDocumentError

    def _read_shard(self, number: int, at: Place, block: int) -> Iterator[_Block]:
        shard = self._shards[number]
        records = islice(shard.records(), block * BLOCK, None)
        empty = block == 0
        while True:
            batch, problem = self._next_records(records, shard.name)
            if batch:
                place = Place(epoch=at.epoch, shard=at.shard, block=block)
                yield _Block(place=place, records=batch, shard=number, name=shard.name)
                empty = empty and not any(isinstance(record, str) and record for record in batch)
                block += 1
            if problem is not None:
                self._trouble.shard(shard.name, problem)
            if problem is not None or len(batch) < BLOCK:
                break
        if empty and problem is None:
            self._trouble.shard(shard.name, "holds no text")

    def _next_records(self, records: Iterator[Record], name: str) -> tuple[list[Record], str | None]:
        """Up to BLOCK records, and what is wrong with the rest of the shard."""
        batch: list[Record] = []
        started_s = self._clock()
        try:
            for record in islice(records, BLOCK):
                batch.append(record)
        except BadShardError as error:
            return batch, str(error)
        finally:
            if (seconds := self._clock() - started_s) > SLOW_S:
                self._trouble.slow(name, seconds)
        return batch, None

    def _tokens(self, block: _Block) -> list[tuple[Place, Tokens]]:
        """The documents of a block in their shuffled order."""
        order = self._generator(block.place.epoch, block.shard, block.place.block).permutation(len(block.records))
        texts = [text for number in order if (text := self._good(block, int(number)))]
        at = block.place
        return [
            (Place(epoch=at.epoch, shard=at.shard, block=at.block, document=document), self._tokenizer.document(text))
            for document, text in enumerate(texts)
        ]

    def _good(self, block: _Block, number: int) -> str | None:
        record = block.records[number]
        if isinstance(record, BadRecordError):
            self._trouble.record(f"{block.name}, record {block.place.block * BLOCK + number + 1}", str(record))
            return None
        return record

    def _generator(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *numbers])
