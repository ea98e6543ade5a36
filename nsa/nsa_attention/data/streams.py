"""Rows of tokens from a shuffled stream of documents.

Shards are shuffled, and the documents of a shard are shuffled in blocks. Every rank cuts the whole stream into rows and
uses its own rows, so the order does not depend on the number of ranks or workers. Each block is read and tokenized by
one rank of a node, which passes it to the other ranks of the node.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np

from ..world import CannotRunError
from .packing import Cursor, Row, rows
from .prefetch import OrderedPrefetch
from .problems import BadRecordError, BadShardError, DataProblems
from .shards import Record, Shard
from .shared_blocks import Reading, Session, SharedBlock, SharedBlocks
from .tokens import Tokenizer, Tokens

# Number of consecutive records in a block. Records are shuffled within a block, and a worker tokenizes a whole block.
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

    @classmethod
    def of(cls, block: tuple[int, int, int]) -> Place:
        """Return the position of a block's first document. `block` is the epoch, shard and number of the block."""
        return cls(epoch=block[0], shard=block[1], block=block[2])

    def of_block(self) -> tuple[int, int, int]:
        return self.epoch, self.shard, self.block


_BlockDocuments = list[tuple["Place", Tokens]]  # the documents of one block


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A block of up to BLOCK consecutive records of a shard."""

    place: Place
    records: Sequence[Record]  # empty if `shared` is given
    reading: Reading
    shard: int  # index in the unshuffled list of shards
    name: str
    shared: SharedBlock | None  # the tokens, if another rank of this node has provided them


class DocumentStream:
    """A data source that packs a stream of documents into rows and can save its position.

    `local_rank` is the rank within its node, and `local_size` the number of ranks on this node. If `local_size` is
    above 1 and `workers` is not 0, only one rank of the node reads and tokenizes each block.
    """

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
        local_rank: int = 0,
        local_size: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shards, self._tokenizer, self._problems = shards, tokenizer, problems
        self._length, self._seed, self._workers, self._clock = length, seed, workers, clock
        self._cursor: Cursor[Place] = Cursor(Place(), 0)
        self._blocks: OrderedPrefetch[_Block | None, _BlockDocuments | None] | None = None
        self._rows: Iterator[tuple[Row, Cursor[Place]]] | None = None
        self._shared: SharedBlocks | None = None
        if local_size > 1 and workers:
            identity = repr((self.identity(), seed, tokenizer.vocab, BLOCK))
            self._shared = SharedBlocks(
                rank=local_rank, size=local_size, shards=len(shards), vocab=tokenizer.vocab, identity=identity
            )
        self._session: Session | None = None
        self.missed: str | None = None  # why this rank read a block that another rank should have provided

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

        Raises CannotRunError if no shard has a document, or if a shard cannot be used and `--bad-shards` is `stop`.
        """
        if self._rows is None:
            self._start()
        assert self._rows is not None
        row, self._cursor = next(self._rows)
        return row

    def close(self) -> None:
        """Stop the worker threads."""
        if self._session is not None:
            self._session.close()
        if self._blocks is not None:
            self._blocks.close()
        self._blocks = self._rows = self._session = None

    def _start(self) -> None:
        begin = self._cursor
        session = self._session = None if self._shared is None else self._shared.start()
        blocks = self._blocks = OrderedPrefetch(
            self._read(begin.place, session),
            partial(self._tokens, session),
            workers=self._workers,
            ahead=BLOCKS_AHEAD,
            name="nsa-loader",
        )
        self._rows = rows(self._documents(blocks, begin.place, session), self._length, begin.token)

    def _documents(
        self, blocks: Iterator[_BlockDocuments | None], begin: Place, session: Session | None
    ) -> Iterator[tuple[Place, Tokens]]:
        """Yield the documents, starting at `begin`. Raise CannotRunError if an epoch contains no token."""
        has_tokens = begin != Place()
        for block in blocks:
            if block is None and not has_tokens:
                problems = self._problems.sentence() or "every text has 0 tokens"
                raise CannotRunError(f"--data: no document in {len(self._shards)} shards; {problems}")
            if session is not None and session.missed and block and block[0][0] >= Place.of(session.missed):
                self.missed = self.missed or session.reason
            has_tokens = block is not None and (has_tokens or any(len(tokens) for _, tokens in block))
            yield from (document for document in block or () if document[0] >= begin)

    def _read(self, begin: Place, session: Session | None) -> Iterator[_Block | None]:
        """Yield blocks of records endlessly, starting with the block that contains document `begin`.

        None marks the end of each epoch.
        """
        for epoch in count(begin.epoch):
            order = self._generator(epoch).permutation(len(self._shards))
            for place in range(begin.shard if epoch == begin.epoch else 0, len(order)):
                location = Place(epoch=epoch, shard=place)
                block = begin.block if (epoch, place) == (begin.epoch, begin.shard) else 0
                yield from self._read_shard(int(order[place]), location, block, session)
                if session is not None and session.is_closed():
                    return
            yield None

    def _read_shard(self, number: int, location: Place, first: int, session: Session | None) -> Iterator[_Block]:
        shard = self._shards[number]
        records, next_block = shard.records(), 0
        is_own = session is None or session.is_own(location.epoch, location.shard)
        is_empty = first == 0
        for block_number in count(first):
            place = replace(location, block=block_number)
            shared = None if session is None or is_own else session.take(*place.of_block())
            if session is not None and session.is_closed():
                return
            batch: list[Record] = []
            if shared is None:
                batch, reading = self._next_records(records, skip=(block_number - next_block) * BLOCK)
                next_block = block_number + 1
            else:
                reading = shared.reading
            if reading.slow_s is not None:
                self._problems.slow(shard.name, reading.slow_s)
            block = _Block(place=place, records=batch, reading=reading, shard=number, name=shard.name, shared=shared)
            if session is not None and is_own:
                session.begin(*place.of_block())
            if reading.records:
                yield block
            elif session is not None and is_own:
                session.offer(*place.of_block(), SharedBlock(reading=reading, documents=[], bad_records=[]))
            is_empty = is_empty and not reading.has_text
            if reading.problem is not None:
                self._problems.shard(shard.name, reading.problem)
            if reading.problem is not None or reading.records < BLOCK:
                break
        if is_empty and reading.problem is None:
            self._problems.shard(shard.name, "contains no text")

    def _next_records(self, records: Iterator[Record], *, skip: int) -> tuple[list[Record], Reading]:
        """Skip `skip` records, and return the next BLOCK records, or fewer, with the outcome of reading them."""
        batch: list[Record] = []
        problem = None
        started_s = self._clock()
        try:
            for record in islice(records, skip, skip + BLOCK):
                batch.append(record)
        except BadShardError as error:
            problem = str(error)
        seconds = self._clock() - started_s
        return batch, Reading(
            records=len(batch),
            has_text=any(isinstance(record, str) and record for record in batch),
            slow_s=seconds if seconds > SLOW_S else None,
            problem=problem,
        )

    def _tokens(self, session: Session | None, block: _Block | None) -> _BlockDocuments | None:
        """Return the position and tokens of each usable document in a block, in shuffled order.

        The result is None if `block` is None, which marks the end of an epoch.
        """
        if block is None:
            return None
        location, content = block.place, block.shared
        if content is None:
            try:
                content = self._tokenize(block)
            finally:
                if session is not None and session.is_own(location.epoch, location.shard):
                    session.offer(*location.of_block(), content)
        for number, problem in content.bad_records:
            self._problems.record(f"{block.name}, record {location.block * BLOCK + number + 1}", problem)
        return [(replace(location, document=document), tokens) for document, tokens in enumerate(content.documents)]

    def _tokenize(self, block: _Block) -> SharedBlock:
        place = block.place
        order = self._generator(place.epoch, block.shard, place.block).permutation(len(block.records))
        records = [(int(number), block.records[number]) for number in order]
        return SharedBlock(
            reading=block.reading,
            documents=[self._tokenizer.document(text) for _, text in records if text and isinstance(text, str)],
            bad_records=[(number, str(error)) for number, error in records if isinstance(error, BadRecordError)],
        )

    def _generator(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *numbers])
