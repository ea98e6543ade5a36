"""Files and streams of every kind, and what is wrong with them: left out and counted, or one error."""

from __future__ import annotations

import errno
import gzip
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Alone

from nsa_attention.data import IGNORED, Batches
from nsa_attention.data.maps import MOST_OPEN, Meta, TokenFile
from nsa_attention.data.problems import BadRecordError, BadShardError, DataProblems
from nsa_attention.data.shards import LONGEST_TEXT, FileShard, HubShard
from nsa_attention.data.stories import story
from nsa_attention.data.streams import SLOW_S, DocumentStream
from nsa_attention.data.tokens import Tokenizer, tokenizer_named
from nsa_attention.settings import read_settings
from nsa_attention.values import FINEWEB_EDU, BadShards, HubData
from nsa_attention.world import CannotRunError, World

ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend=None)
TEXTS = [story(number) for number in range(40)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def loader(data: Path, *options: str) -> Batches:
    return Batches(read_settings(("--data", str(data), "--seq-len", "32", *options), {}), ALONE)


def records(path: Path, field: str = "text") -> list[str | BadRecordError]:
    return list(FileShard(path=path, text_field=field).records())


class FakeZstd(ModuleType):
    """zstandard's names at the border, over deflate: frames that end, and damage that is told."""

    class ZstdError(Exception):
        pass

    class ZstdDecompressor:
        def decompressobj(self) -> Any:
            return FakeFrame()


class FakeFrame:
    def __init__(self) -> None:
        self._inner = zlib.decompressobj()

    def decompress(self, block: bytes) -> bytes:
        try:
            return self._inner.decompress(block)
        except zlib.error as error:
            raise FakeZstd.ZstdError(str(error)) from error

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


class FakeArrow(ModuleType):
    class ArrowException(Exception):
        pass


class FakeParquet(ModuleType):
    """Rows as JSON behind four letters."""

    class ParquetFile:
        def __init__(self, opened: Any) -> None:
            content = opened.read()
            if not content.startswith(b"PAR1"):
                raise FakeArrow.ArrowException("Parquet magic bytes not found\nin footer")
            self._rows = json.loads(content[4:])

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        @property
        def schema_arrow(self) -> Any:
            return SimpleNamespace(names=list(self._rows[0]))

        def iter_batches(self, batch_size: int, columns: list[str]) -> Iterator[Any]:
            for first in range(0, len(self._rows), batch_size):
                values = [row[columns[0]] for row in self._rows[first : first + batch_size]]
                yield SimpleNamespace(column=lambda _, values=values: SimpleNamespace(to_pylist=lambda: values))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optional packages at the border of the import."""
    for module in (FakeZstd("zstandard"), FakeArrow("pyarrow"), FakeParquet("pyarrow.parquet")):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl.gz", gzip.compress(LINES)),
        ("a.jsonl.zst", zlib.compress(LINES[:5000]) + zlib.compress(LINES[5000:])),
        ("a.parquet", b"PAR1" + json.dumps([{"text": text} for text in TEXTS]).encode()),
    ],
)
def test_each_kind_of_file_gives_its_texts(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert records(tmp_path / name) == TEXTS


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["txt", "txt.gz"])
def test_a_long_text_is_cut_at_the_ends_of_lines(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    text = "".join(f"Zeile {number} grüßt\n" for number in range(120_000))
    path = tmp_path / ("long.txt" if pack is bytes else "long.txt.gz")
    path.write_bytes(pack(text.encode()))
    pieces = records(path)
    assert "".join(map(str, pieces)) == text
    assert len(pieces) > 1
    assert all(str(piece).endswith("\n") and len(str(piece).encode()) < LONGEST_TEXT + 100 for piece in pieces)


def vanishes(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def leads_nowhere(path: Path) -> None:
    path.symlink_to(path.name)


def written(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


PACKED = gzip.compress(LINES)
DAMAGED = PACKED[:600] + b"\xff" * 40 + PACKED[640:]
BAD_SHARDS = {
    "vanished": ("b.jsonl", vanishes, "b.jsonl: does not exist any more"),
    "unreadable": ("b.jsonl", leads_nowhere, "b.jsonl: cannot be read (Too many levels of symbolic links)"),
    "a folder": ("b.jsonl", Path.mkdir, "b.jsonl: cannot be read (Is a directory)"),
    "empty": ("b.jsonl", Path.touch, "b.jsonl: contains no text"),
    "empty texts only": ("b.jsonl", written(b'{"text": ""}\n\n'), "b.jsonl: contains no text"),
    "cut gzip": ("b.jsonl.gz", written(PACKED[:-500]), "b.jsonl.gz: ends in the middle of its compressed content"),
    "damaged gzip": (
        "b.jsonl.gz",
        written(DAMAGED),
        "b.jsonl.gz: its compressed content is damaged (Error -3 while decomp",
    ),
    "no gzip": (
        "b.jsonl.gz",
        written(LINES),
        "b.jsonl.gz: its compressed content is damaged (Not a gzipped file (b'{\"'))",
    ),
    "cut zstd": ("b.jsonl.zst", written(zlib.compress(LINES)[:-9]), "b.jsonl.zst: ends in the middle of its comp"),
    "damaged zstd": (
        "b.jsonl.zst",
        written(LINES),
        "b.jsonl.zst: its compressed content is damaged (Error -3 while decompr",
    ),
    "no parquet": ("b.parquet", written(LINES), "b.parquet: is not a parquet file or is damaged (Parquet magic bytes "),
    "no column": ("b.parquet", written(b'PAR1[{"body": "x"}]'), 'b.parquet: has no column "text", only body'),
}
BAD_RECORDS = {
    "not UTF-8": (b'{"text": "caf\xe9"}\n', "b.jsonl, record 1: is not UTF-8 (byte 13 of the line)"),
    "not JSON": (b'{"text": "cut o\n', "b.jsonl, record 1: is not JSON (Invalid control character at"),
    "no field": (b'{"body": "x", "id": 3}\n', 'b.jsonl, record 1: has no field "text", only body, id'),
    "no object": (b'["text"]\n', "b.jsonl, record 1: is not a JSON object but list"),
    "no text": (b'{"text": 7}\n', 'b.jsonl, record 1: field "text" is not a string but int'),
}


def with_a_good_one(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / "a.jsonl").write_bytes(LINES)
    make(folder / name)


def whole_epochs(batches: Batches) -> None:
    """More batches than come of all texts."""
    assert all(batches.fetch().tokens.shape == (2, 32) for _ in range(1400))


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("kind", BAD_SHARDS)
class TestABadShard:
    def test_is_left_out_counted_and_told(self, tmp_path: Path, kind: str) -> None:
        name, make, told = BAD_SHARDS[kind]
        with_a_good_one(tmp_path, name, make)
        batches = loader(tmp_path, "--bad-shards", "skip")
        whole_epochs(batches)
        batches.close()
        sentence = batches.problems.sentence()
        assert sentence is not None
        assert sentence.startswith("1 shards skipped: ")
        assert told in sentence
        assert batches.summary()["left_out"] == {"shards": 1}

    def test_stops_the_run_with_one_error(self, tmp_path: Path, kind: str) -> None:
        name, make, told = BAD_SHARDS[kind]
        with_a_good_one(tmp_path, name, make)
        batches = loader(tmp_path)
        with pytest.raises(CannotRunError) as caught:
            whole_epochs(batches)
        batches.close()
        assert told in str(caught.value)
        assert str(caught.value).endswith("; --bad-shards skip skips and counts it")
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", BAD_RECORDS)
class TestABadRecord:
    def test_is_left_out_and_the_shard_goes_on(self, tmp_path: Path, kind: str) -> None:
        line, told = BAD_RECORDS[kind]
        (tmp_path / "b.jsonl").write_bytes(line + LINES)
        batches = loader(tmp_path, "--bad-shards", "skip")
        for _ in range(100):
            batches.fetch()
        batches.close()
        assert batches.summary()["left_out"]["records"] == 1
        assert told in str(batches.problems.sentence())

    def test_stops_the_run_with_one_error(self, tmp_path: Path, kind: str) -> None:
        line, told = BAD_RECORDS[kind]
        (tmp_path / "b.jsonl").write_bytes(line + LINES)
        batches = loader(tmp_path)
        with pytest.raises(CannotRunError) as caught:
            batches.fetch()
        batches.close()
        assert told in str(caught.value)


def test_what_stops_the_run_does_so_though_a_worker_that_is_an_epoch_ahead_has_met_it() -> None:
    trouble = DataProblems(BadShards.STOP)
    for _ in range(2):
        with pytest.raises(CannotRunError, match="is not JSON"):
            trouble.record("b.jsonl, record 1", "is not JSON")


def test_a_text_that_is_not_utf_8_is_a_bad_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9\n")
    (record,) = records(tmp_path / "a.txt")
    assert isinstance(record, BadRecordError)
    assert str(record) == "is not UTF-8 (byte 3 of the text)"


def test_what_was_read_before_the_damage_is_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(PACKED[:-500])
    batches = loader(tmp_path, "--bad-shards", "skip", "--packing", "stream", "--workers", "0")
    seen = b"".join(bytes(batches.fetch().tokens.flatten().tolist()) for _ in range(200))
    assert sum(text.encode() in seen for text in TEXTS) > 5


def test_no_document_at_all_is_an_error_with_what_was_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.jsonl").write_bytes(b"no json\n")
    batches = loader(tmp_path, "--bad-shards", "skip")
    with pytest.raises(CannotRunError, match=r"no document in 2 shards; 1 records skipped, 2 shards skipped: "):
        batches.fetch()
    batches.close()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_shards_of_empty_records_only_are_an_error_and_not_read_for_ever(tmp_path: Path, workers: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ""}\n' * 600)
    batches = loader(tmp_path, "--bad-shards", "skip", "--workers", workers)
    with pytest.raises(CannotRunError, match=r"no document in 1 shards; 1 shards skipped: .*a.jsonl: contains no text"):
        batches.fetch()
    batches.close()


def test_texts_without_a_token_are_an_error_and_not_read_for_ever(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    shard = FileShard(path=tmp_path / "a.jsonl", text_field="text")
    nothing = Tokenizer(name="nothing", vocab=9, end=None, encode=lambda _: np.zeros(0, np.uint8))
    documents = DocumentStream([shard], nothing, DataProblems(BadShards.STOP), length=32, seed=0, workers=0)
    with pytest.raises(CannotRunError, match="--data: no document in 1 shards; every text has 0 tokens"):
        documents.next_row()


def test_a_slow_read_is_told_and_never_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    trouble = DataProblems(BadShards.STOP)
    ticks = iter(range(0, 10_000, int(SLOW_S) + 1))
    shard = FileShard(path=tmp_path / "a.jsonl", text_field="text")
    documents = DocumentStream(
        [shard], tokenizer_named("bytes"), trouble, length=32, seed=0, workers=0, clock=lambda: float(next(ticks))
    )
    documents.next_row()
    assert str(trouble.sentence()).startswith("1 slow reads: ")
    assert str(trouble.sentence()).endswith("a.jsonl: a read took 6.0 s")
    assert trouble.summary()["left_out"] == {}


def tokens_at(folder: Path, name: str = "train.bin", count: int = 1000, dtype: str = "<u2") -> Path:
    path = folder / name
    path.write_bytes(np.arange(count).astype(dtype).tobytes() if count < 256 else _tokens(count, dtype))
    return path


def _tokens(count: int, dtype: str) -> bytes:
    return np.random.default_rng(3).integers(0, 256, count).astype(dtype).tobytes()


BAD_TOKENS = {
    "vanished": (vanishes, "b.bin: does not exist any more"),
    "unreadable": (leads_nowhere, "b.bin: cannot be read (Too many levels of symbolic links)"),
    "a folder": (Path.mkdir, "b.bin: cannot be read (Is a directory)"),
    "empty": (Path.touch, "b.bin: is empty"),
    "odd": (written(b"123"), "b.bin: its 3 bytes are not a whole number of uint16 tokens"),
    "too short": (written(bytes(64)), "b.bin: its 32 tokens are too few for sequences of 32"),
    "other vocabulary": (written(bytes(80) + b"\x00\x01" + bytes(80)), "b.bin: token 40 is 256, and the vocabulary"),
}


@pytest.mark.parametrize("kind", BAD_TOKENS)
class TestABadFileOfTokens:
    def test_is_left_out_counted_and_told(self, tmp_path: Path, kind: str) -> None:
        make, told = BAD_TOKENS[kind]
        tokens_at(tmp_path, "a.bin")
        make(tmp_path / "b.bin")
        batches = loader(tmp_path, "--bad-shards", "skip")
        for _ in range(40):
            batches.fetch()
        batches.close()
        assert told in str(batches.problems.sentence())
        assert batches.summary()["left_out"] == {"shards": 1}

    def test_stops_the_run_with_one_error(self, tmp_path: Path, kind: str) -> None:
        make, told = BAD_TOKENS[kind]
        tokens_at(tmp_path, "a.bin")
        make(tmp_path / "b.bin")
        with pytest.raises(CannotRunError) as caught:
            loader(tmp_path)
        assert told in str(caught.value)


def test_a_file_of_tokens_that_shrinks_is_noticed_and_no_process_dies(tmp_path: Path) -> None:
    path = tokens_at(tmp_path)
    batches = loader(tmp_path, "--bad-shards", "skip", "--workers", "0")
    os.truncate(path, 400)
    seen = [batches.fetch() for _ in range(20)]
    assert len(seen) == 20
    assert "train.bin: has shrunk from 1000 tokens to 200" in str(batches.problems.sentence())
    assert batches.summary()["left_out"]["rows"] > 0
    os.truncate(path, 0)
    with pytest.raises(CannotRunError, match="no window can be read"):
        batches.fetch()


def test_a_window_that_cannot_be_read_is_trained_on_by_nobody_and_no_other_twice(tmp_path: Path) -> None:
    path = tokens_at(tmp_path, "a.bin", count=200)
    tokens_at(tmp_path, "b.bin")
    batches = loader(tmp_path, "--bad-shards", "skip", "--workers", "0", "--batch", "1")
    os.truncate(path, 300)
    epoch = [batches.fetch() for _ in range(6 + 31)]
    counted = [tuple(batch.tokens[0].tolist()) for batch in epoch if batch.counted == 32]
    assert len(counted) == len(set(counted)) == 4 + 31
    left_out = [batch for batch in epoch if batch.counted != 32]
    assert [batch.counted for batch in left_out] == [0, 0]
    assert all(bool((batch.targets == IGNORED).all()) for batch in left_out)
    assert batches.summary()["left_out"] == {"rows": 2}


def test_a_step_whose_windows_cannot_be_read_has_the_loss_zero_and_the_run_goes_on(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_at(tmp_path)
    reads, read = count(), TokenFile.read

    def fail_once(file: TokenFile, first: int, number: int) -> Any:
        if number == 33 and next(reads) == 1:
            raise BadShardError("planted")
        return read(file, first, number)

    monkeypatch.setattr(TokenFile, "read", fail_once)
    options = ["--layers", "1", "--seq-len", "32", "--batch", "1", "--steps", "3", "--workers", "0"]
    status, output, error = alone("--data", "train.bin", "--bad-shards", "skip", *options)
    assert status == 0, error
    rows = (tmp_path / "out" / "training.csv").read_text(encoding="utf-8").splitlines()[1:]
    losses = [float(row.split(",")[1]) for row in rows]
    assert losses[1] == 0.0
    assert min(losses[0], losses[2]) > 5.0
    assert output.splitlines()[-1].startswith("nsa.train data: 1 rows skipped: train.bin: planted")


def test_files_of_tokens_are_evaluated_more_than_once(alone: Alone, tmp_path: Path) -> None:
    tokens_at(tmp_path)
    options = ("--layers", "1", "--seq-len", "32", "--steps", "2", "--eval-every", "1", "--eval-data", "train.bin")
    status, output, error = alone("--data", "train.bin", *options)
    assert status == 0, error
    assert output.count("evaluation step") == 2


def test_ranks_that_could_open_other_files_of_tokens_are_at_other_positions(tmp_path: Path) -> None:
    """Else each trains on windows of an order of its own: some twice, some never, and no rank says so."""
    ranks = []
    for name in ("whole", "copy", "lacks"):
        (folder := tmp_path / name).mkdir()
        for file in ("a.bin", "b.bin"):
            tokens_at(folder, file)
        if name == "lacks":
            (folder / "b.bin").unlink()
            (folder / "b.bin").mkdir()
        ranks.append(loader(folder, "--bad-shards", "skip"))
    digests = []
    for batches in ranks:
        digests.append([(batches.fetch(), batches.position_digest())[1] for _ in range(12)])
        batches.close()
    assert digests[0] == digests[1]
    # One of 64 numbers is compared with each loss: ranks that differ are equal by chance in few steps only.
    assert sum(ours == theirs for ours, theirs in zip(digests[0], digests[2], strict=True)) <= 2
    assert [batches.position_text() for batches in ranks] == ["row 24, files 2", "row 24, files 2", "row 24, files 1"]


@pytest.mark.parametrize("skip", [(), ("--bad-shards", "skip")], ids=["stop", "skip"])
@pytest.mark.parametrize(("dtype", "bits"), [("<u4", 32), ("<i4", 32), ("<i8", 64)])
def test_wide_tokens_that_nothing_describes_are_refused_and_not_read_with_zeros(
    tmp_path: Path, dtype: str, bits: int, skip: tuple[str, ...]
) -> None:
    tokens_at(tmp_path, dtype=dtype)
    with pytest.raises(
        CannotRunError, match=rf"train.bin: its tokens are {bits}-bit integers, and .*meta.json"
    ) as caught:
        loader(tmp_path, *skip)
    assert len(str(caught.value).splitlines()) == 1
    if bits == 32:  # what the message says is enough
        (tmp_path / "meta.json").write_text('{"dtype": "uint32", "vocab": 256}')
        loader(tmp_path).close()


def test_wide_tokens_of_a_large_vocabulary_are_noticed_and_narrow_ones_taken(tmp_path: Path) -> None:
    draw = np.random.default_rng(0).integers
    for dtype, vocab, refused in (("<u4", 128_256, True), ("<i8", 128_256, True), ("<u2", 60_000, False)):
        (path := tmp_path / "a.bin").write_bytes(draw(0, vocab, 1000).astype(dtype).tobytes())
        with pytest.raises(CannotRunError, match="-bit integers") if refused else nullcontext():
            TokenFile(path, Meta(), 128_256)
    path.write_bytes(bytes(4000))
    assert TokenFile(path, Meta(), 256).tokens == 2000


def test_a_run_on_wide_tokens_that_nothing_describes_is_one_error(alone: Alone, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    tokens_at(tmp_path / "tokens", dtype="<u4")
    status, _, error = alone("--data", "tokens")
    assert status == 2
    assert error.startswith("nsa.train: error: --data: tokens/train.bin: its tokens are 32-bit integers")
    assert len(error.splitlines()) == 1


def test_few_files_of_tokens_are_open_at_a_time(tmp_path: Path) -> None:
    for number in range(MOST_OPEN + 30):
        tokens_at(tmp_path, f"{number}.bin", count=40)
    batches = loader(tmp_path, "--batch", "1", "--workers", "3")
    assert len({batches.fetch().tokens.shape for _ in range(3 * MOST_OPEN)}) == 1
    assert 0 < len(open_below(tmp_path)) <= MOST_OPEN + 3
    batches.close()
    assert open_below(tmp_path) == []


def open_below(folder: Path) -> list[str]:
    targets = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [target for target in targets if target.startswith(str(folder))]


@pytest.mark.parametrize("name", ["a.bin", "a.jsonl"])
def test_too_many_open_files_are_no_damage_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_bytes(LINES)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(*((os, "open") if name == "a.bin" else (Path, "open")), fail)
    with pytest.raises(CannotRunError) as caught:
        loader(tmp_path, "--bad-shards", "skip", "--workers", "0").fetch()
    assert str(caught.value) == "Too many open files; raise the limit with ulimit -n"


def test_files_of_32_bits_and_their_documents_are_read_by_what_is_beside_them(tmp_path: Path) -> None:
    tokens_at(tmp_path, count=200, dtype="<u4")
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": "uint32", "vocab": 256, "end": 10}))
    batches = loader(tmp_path, "--batch", "1")
    assert batches.description() == "token files, packing documents, 2 workers"
    windows = sorted(tuple(batches.fetch().tokens[0].tolist()) for _ in range(6))
    assert windows == [tuple(range(first, first + 32)) for first in range(0, 192, 32)]
    batches.close()
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": "uint8", "vocab": 256}))
    with pytest.raises(CannotRunError, match=r"meta.json: not what nsa.prepare writes"):
        loader(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": "uint32", "vocab": 50257}))
    with pytest.raises(CannotRunError, match="tokens from a vocabulary of 50257, the model has 256"):
        loader(tmp_path)


def test_what_a_folder_keeps_for_validation_is_left_aside(tmp_path: Path) -> None:
    """As nanoGPT's folders have it: train.bin, val.bin and no word on what the numbers mean."""
    tokens_at(tmp_path, count=200)
    (tmp_path / "val.bin").write_bytes(b"123")
    batches = loader(tmp_path, "--batch", "1")
    assert batches.description() == "token files, packing stream, 2 workers"
    windows = sorted(tuple(batches.fetch().tokens[0].tolist()) for _ in range(6))
    batches.close()
    assert windows == [tuple(range(first, first + 32)) for first in range(0, 192, 32)]


def test_a_file_of_tokens_is_read_where_it_is_asked(tmp_path: Path) -> None:
    file = TokenFile(tokens_at(tmp_path, count=200), Meta(), 256)
    assert file.read(100, 5).tolist() == [100, 101, 102, 103, 104]
    with pytest.raises(BadShardError, match="has shrunk from 200 tokens to 200"):
        file.read(198, 3)


class FakeHub(ModuleType):
    def __init__(self, rows: list[Any]) -> None:
        super().__init__("datasets")
        self.rows, self.asked = rows, []  # type: ignore[var-annotated]

    def load_dataset(self, *given: Any, **named: Any) -> Iterator[Any]:
        self.asked.append((given, named))
        for row in self.rows:
            if isinstance(row, Exception):
                raise row
            yield row


def hub(monkeypatch: pytest.MonkeyPatch, rows: list[Any]) -> FakeHub:
    fake = FakeHub(rows)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


def test_a_data_set_of_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = hub(monkeypatch, [{"text": text, "id": 1} for text in TEXTS])
    settings = read_settings(("--data", "fineweb_edu", "--seq-len", "32"), {})
    assert settings.data is FINEWEB_EDU
    batches = Batches(settings, ALONE)
    assert batches.fetch().tokens.shape == (2, 32)
    batches.close()
    assert fake.asked[0] == (
        ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
        {"split": "train", "streaming": True},
    )
    assert read_settings(("--data", "hf:a/b::test"), {}).data == HubData("a/b", None, "test")
    assert read_settings(("--data", "hf:a/b:c"), {}).data == HubData("a/b", "c", "train")


def test_what_the_hub_raises_is_a_bad_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, [{"text": "one"}, ConnectionError("no route\nto the hub")])
    shard = HubShard(path="a/b", config=None, split="train", text_field="text")
    with pytest.raises(BadShardError, match=r"^cannot be read \(ConnectionError: no route\)$"):
        list(shard.records())
    hub(monkeypatch, [{"body": "one", "id": 3}])
    with pytest.raises(BadShardError, match='has no column "text", only body, id'):
        list(shard.records())


@pytest.mark.parametrize(
    ("name", "content", "package"),
    [("a.jsonl.zst", b"x", "zstandard"), ("a.parquet", b"x", "pyarrow"), ("", b"", "datasets")],
)
def test_a_missing_package_is_one_error_that_names_the_extra(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, package: str
) -> None:
    for module in ("zstandard", "pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "x").write_bytes(content)
    if name:
        (tmp_path / name).write_bytes(content)
    status, _, error = alone("--data", name or "hf:a/b", "--bad-shards", "skip", "--layers", "1")
    assert status == 2
    assert error.endswith(f": needs {package}; pip install 'nsa-harness[data]'\n")
    assert len(error.splitlines()) == 1


class FakeTokenizers(ModuleType):
    """Letters by their place in the alphabet."""

    class Tokenizer:
        @staticmethod
        def from_file(path: str) -> Any:
            if "broken" in path:
                raise Exception("expected value at line 1")  # as the package does
            return SimpleNamespace(
                get_vocab_size=lambda: 30,
                token_to_id=lambda word: 29 if word == "</s>" else None,
                encode=lambda text, add_special_tokens: SimpleNamespace(
                    ids=[ord(letter) % 28 for letter in text if not add_special_tokens]
                ),
            )


class FakeTiktoken(ModuleType):
    class Encoding:
        def __init__(self, name: str, *, pat_str: str, mergeable_ranks: Any, special_tokens: Any) -> None:
            self.n_vocab = 1 + max(special_tokens.values())
            self._ranks = mergeable_ranks
            assert (name, "\\p{L}" in pat_str, special_tokens) == ("gpt2", True, {"<|endoftext|>": 50256})

        def encode_ordinary(self, text: str) -> list[int]:
            return [self._ranks[letter.encode()] for letter in text]


def test_the_vocabularies_of_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", FakeTokenizers("tokenizers"))
    monkeypatch.setitem(sys.modules, "tiktoken", FakeTiktoken("tiktoken"))
    of_json = tokenizer_named(str(tmp_path / "tokenizer.json"))
    assert (of_json.vocab, of_json.end, of_json.dtype) == (30, 29, np.uint16)
    assert of_json.document("ab").tolist() == [13, 14, 29]
    (tmp_path / "gpt2.tiktoken").write_text("YQ== 5\nYg== 7\n")
    of_ranks = tokenizer_named(str(tmp_path / "gpt2.tiktoken"))
    assert (of_ranks.vocab, of_ranks.document("abba").tolist()) == (50257, [5, 7, 7, 5, 50256])


def test_a_file_that_is_no_vocabulary_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", FakeTokenizers("tokenizers"))
    monkeypatch.setitem(sys.modules, "tiktoken", FakeTiktoken("tiktoken"))
    (tmp_path / "gpt2.tiktoken").write_text("no ranks here\n")
    for name, message in (
        ("broken.json", r"not a tokenizer.json \(expected value at line 1\)"),
        ("gpt2.tiktoken", r"not a file of token ranks"),
        ("mine.tiktoken", r"the file name determines how text is split; known names are cl100k_base.tiktoken, gpt2"),
    ):
        with pytest.raises(CannotRunError, match=message):
            tokenizer_named(str(tmp_path / name))
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(CannotRunError, match=r"gpt2.tiktoken: tiktoken is not installed; pip install 'nsa-harness"):
        tokenizer_named(str(tmp_path / "gpt2.tiktoken"))


def test_a_vocabulary_that_is_larger_than_the_models_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", FakeTiktoken("tiktoken"))
    (tmp_path / "gpt2.tiktoken").write_text("YQ== 5\n")
    with pytest.raises(CannotRunError, match=r"gpt2.tiktoken needs a vocabulary of 50257, shape ci has 256"):
        loader(Path("stories"), "--tokenizer", str(tmp_path / "gpt2.tiktoken"))


def test_a_bad_shard_in_the_middle_of_a_run_ends_it_without_a_trace(alone: Alone, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.jsonl").write_bytes(LINES + b"no json\n")
    status, _, error = alone("--data", "shards", "--phase", "data", "--steps", "500")
    assert status == 2
    assert error.startswith("nsa.train: error: shards/a.jsonl, record 41: is not JSON (")
    assert error.count("\n") == 1


def test_what_was_left_out_is_told_at_the_end(alone: Alone, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES + b"no json\n")
    status, output, _ = alone("--data", "a.jsonl", "--phase", "data", "--steps", "30", "--bad-shards", "skip")
    assert status == 0
    assert output.splitlines()[-1].startswith("nsa.train data: 1 records skipped: a.jsonl, record 41: is not JSON (")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no file that ends with .txt, .txt.gz, "),
        (["a.bin", "b.jsonl"], "contains token files (.bin) and text files; select one kind"),
    ],
)
def test_a_folder_without_one_kind_of_data_is_an_error(
    alone: Alone, tmp_path: Path, names: list[str], message: str
) -> None:
    (tmp_path / "shards").mkdir()
    for name in names:
        (tmp_path / "shards" / name).write_bytes(LINES)
    status, _, error = alone("--data", "shards")
    assert status == 2
    assert error.startswith(f"nsa.train: error: --data shards: {message}")
