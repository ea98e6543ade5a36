"""Blocks that the ranks of a node share: tokenized once, the rows of one rank alone, and no rank waits for ever."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import struct
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from ranks import ended, fork_ranks, run_forks, wait_for

from nsa_attention.data import Batches, shared_blocks
from nsa_attention.data.problems import DataProblems
from nsa_attention.data.shards import FileShard
from nsa_attention.data.shared_blocks import Reading, SharedBlock, SharedBlocks
from nsa_attention.data.stories import story
from nsa_attention.data.streams import DocumentStream
from nsa_attention.data.tokens import tokenizer_named
from nsa_attention.settings import read_settings
from nsa_attention.values import BadShards
from nsa_attention.world import CannotRunError, World, _local_size

CPU = torch.device("cpu")
READING = Reading(records=3, has_text=True, slow_s=None, problem=None)


def lines(first: int, number: int) -> bytes:
    return b"".join(
        json.dumps({"text": f"Text {n}. " * (1 + n % 3)}).encode() + b"\n" for n in range(first, first + number)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of several blocks, of a whole number of blocks, and with every kind of problem."""
    place = tmp_path_factory.mktemp("shards")
    (place / "a.jsonl").write_bytes(lines(0, 600))
    (place / "b.jsonl").write_bytes(lines(1000, 512))
    (place / "c.jsonl.gz").write_bytes(gzip.compress(lines(2000, 900))[:-2500])
    (place / "d.jsonl").write_bytes(lines(3000, 300) + b"no json\n" + lines(3300, 5) + b'{"body": 1}\n')
    (place / "e.jsonl").touch()
    (place / "f.txt").write_text("".join(story(number) for number in range(3)), encoding="utf-8")
    return place


def loader(data: Path, *options: str, rank: int = 0, size: int = 1, shares: bool = True) -> Batches:
    world = World(rank=rank, local_rank=rank, size=size, device=CPU, backend=None, local_size=size if shares else 1)
    words = ("--data", str(data), "--seq-len", "64", "--batch", "2", "--bad-shards", "skip", *options)
    return Batches(read_settings(words, {}), world)


@pytest.fixture(autouse=True)
def next_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the streams of all ranks in this process find each other, and no others.

    Other tests have opened streams before, or open some at the same time in another process.
    """
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"run of process {os.getpid()}")
    highest = max(shared_blocks._streams.values(), default=0)
    shared_blocks._streams.update({rank: highest - shared_blocks._streams[rank] for rank in range(3)})


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time for a busy machine, so that a block that is read twice is no accident."""
    monkeypatch.setattr(shared_blocks, "WAIT_S", 100.0)


def at_once(ranks: list[Any], work: Callable[[Any], Any]) -> list[Any]:
    """The results of all ranks, which work next to each other as the processes of a run do."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def fetched(ranks: list[Batches], steps: int) -> list[list[Any]]:
    """All that each rank trains on and stores, step by step."""

    def fetch(rank: Batches) -> list[Any]:
        batches = ((rank.fetch(), rank.state_dict(), rank.position_digest()) for _ in range(steps))
        return [
            (batch.tokens.tolist(), batch.targets.tolist(), batch.lengths, state, digest)
            for batch, state, digest in batches
        ]

    return list(map(list, zip(*at_once(ranks, fetch), strict=True)))


def closed(ranks: list[Batches]) -> list[tuple[Any, set[str]]]:
    for rank in ranks:
        rank.close()
    summaries = [rank.summary() for rank in ranks]
    return [(summary["left_out"], set(summary["examples"])) for summary in summaries]


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("workers", ["0", "1", "4"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_ranks_read_what_each_would_read_alone(
    folder: Path, size: int, workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, at = 1500 // size, 700 // size  # more than three epochs
    whole = [loader(folder, "--workers", "0", rank=rank, size=size, shares=False) for rank in range(size)]
    expected = fetched(whole, steps)
    ranks = [loader(folder, "--workers", workers, rank=rank, size=size) for rank in range(size)]
    assert fetched(ranks, at) == expected[:at]
    state = ranks[0].state_dict()
    assert fetched(ranks, 5) == expected[at : at + 5]
    for rank in ranks:  # back, in the middle of an epoch
        rank.load_state_dict(json.loads(json.dumps(state)))
    assert fetched(ranks, steps - at) == expected[at:]
    assert 0 < state["position"]["epoch"] < expected[-1][0][3]["position"]["epoch"] - 1
    assert closed(ranks) == closed(whole)
    resumed = [loader(folder, "--workers", workers, rank=rank, size=size) for rank in range(size)]
    for rank in resumed:
        rank.load_state_dict(state)
    assert fetched(resumed, 20) == expected[at : at + 20]
    closed(resumed)
    assert "[DATA]" not in capsys.readouterr().out


COUNTING = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
from nsa_attention.data import Batches, loader, shared_blocks
from nsa_attention.data.tokens import Tokenizer
from nsa_attention.settings import read_settings
from nsa_attention.world import join_ranks

shared_blocks.WAIT_S = 100.0
seen, document = [], Tokenizer.document
Tokenizer.document = lambda self, text: seen.append(text) or document(self, text)
with join_ranks("cpu", "gloo", needs_group=True) as world:
    batches = Batches(read_settings(sys.argv[1:], {}), world)
    rows = [batches.fetch().tokens.tolist() for _ in range(300)]
    world.wait_for_all()
    batches.close()
    world.wait_for_all()
Path(f"rank{world.rank}.json").write_text(json.dumps([seen, rows]))
"""


def test_two_ranks_tokenize_each_document_once(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    for number in range(12):
        (tmp_path / "shards" / f"{number}.jsonl").write_bytes(lines(1000 * number, 600))
    (program := tmp_path / "counting.py").write_text(COUNTING)
    words = (str(program), str(ROOT / "nsa"), "--data", "shards", "--seq-len", "64", "--batch", "2")
    ranks = run_forks(2, *words, boards=None, cwd=tmp_path, LOCAL_WORLD_SIZE="2")
    assert [rank.status for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    assert all("[DATA]" not in rank.out for rank in ranks)
    contents = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    times = Counter(text for seen, _ in contents for text in seen)
    assert max(times.values()) == 1
    assert all(len(seen) > 500 for seen, _ in contents)  # both of them work
    alone = loader(tmp_path / "shards", "--batch", "4")
    assert [rows for pair in zip(*(rows for _, rows in contents), strict=True) for rows in pair] == [
        rows for _ in range(300) for batch in [alone.fetch().tokens.tolist()] for rows in (batch[:2], batch[2:])
    ]
    alone.close()


def test_the_number_of_ranks_of_a_node_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, rank, size, expected in (
        ("2", 1, 4, 2), ("", 0, 4, 1), ("two", 0, 4, 1), ("8", 0, 4, 1), ("2", 2, 4, 1), ("1", 0, 4, 1),
    ):  # fmt: skip
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        assert _local_size(rank, size) == expected


@pytest.mark.parametrize(("size", "workers"), [(1, "2"), (2, "0")])
def test_one_rank_and_no_workers_open_no_socket(
    folder: Path, size: int, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_blocks, "SharedBlocks", None)
    monkeypatch.setattr("nsa_attention.data.streams.SharedBlocks", None)
    batches = loader(folder, "--workers", workers, size=size)
    assert len(fetched([batches], 5)) == 5
    batches.close()


class TestARankThatGetsNoBlocks:
    """It reads them itself: the rows stay the same, and it says so once."""

    def check(
        self, folder: Path, capsys: pytest.CaptureFixture[str], reason: str, other: Batches | None = None
    ) -> None:
        whole, batches = loader(folder, rank=1, size=2, shares=False), loader(folder, rank=1, size=2)
        if other is not None:
            other.fetch()
        assert fetched([batches], 150) == fetched([whole], 150)
        assert closed([batches]) == closed([whole])
        said = [line for line in capsys.readouterr().out.splitlines() if "[DATA]" in line]
        assert len(said) == 1
        assert said[0].startswith("[DATA] rank=1 reads blocks of another rank itself: local rank 0: ")
        assert reason in said[0]

    def test_because_the_other_has_never_started(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_blocks, "WAIT_S", 0.1)
        self.check(folder, capsys, "it did not provide one within 0.1 s")

    def test_because_the_other_is_late(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_blocks, "WAIT_S", 0.1)
        other = loader(folder, rank=0, size=2)
        other.fetch()  # and no more
        self.check(folder, capsys, "it did not provide one within 0.1 s")
        other.close()

    def test_because_there_are_no_sockets(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(socket, "socket", refuse)
        self.check(folder, capsys, "this rank has no socket")

    def test_because_the_other_reads_other_data(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_blocks, "WAIT_S", 0.1)
        other = loader(folder, "--seed", "7", rank=0, size=2)
        other.fetch()
        self.check(folder, capsys, "it did not provide one")
        other.close()

    @pytest.mark.parametrize("answer", range(9))
    def test_because_the_answers_are_no_blocks(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: int
    ) -> None:
        monkeypatch.setattr(shared_blocks, "WAIT_S", 0.2)
        reading = {"records": 1, "has_text": True, "slow_s": None, "problem": None}
        content = [
            b"?" * 40,
            b"?",
            struct.pack("<QQ", 1 << 62, 1 << 62),
            described(b"no json", b""),
            described(b"[" * 100_000, b""),
            described(json.dumps([reading, [2], [], "|O"]).encode(), b"12345678"),
            described(json.dumps([reading, [-1, 3], [], "|u1"]).encode(), b"12"),
            described(json.dumps([{**reading, "records": "1"}, [2], [], "|u1"]).encode(), b"12"),
            described(json.dumps([reading, [1], [], "<u2"]).encode(), b"\xff\xff"),  # no such token
        ][answer]
        monkeypatch.setattr(SharedBlock, "encode", lambda _: content)
        other = loader(folder, rank=0, size=2)
        self.check(folder, capsys, "its block is not valid", other)
        other.close()


def described(description: bytes, tokens: bytes) -> bytes:
    return struct.pack("<QQ", len(tokens), len(description)) + tokens + description


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("size", [2, 3])
def test_what_stops_the_run_stops_every_rank(folder: Path, size: int) -> None:
    ranks = [loader(folder, "--bad-shards", "stop", rank=rank, size=size) for rank in range(size)]
    alone = loader(folder, "--bad-shards", "stop")

    def error_of(rank: Batches) -> str:
        with pytest.raises(CannotRunError) as caught:
            fetched([rank], 600)
        return str(caught.value)

    assert set(at_once(ranks, error_of)) == {error_of(alone)}
    closed([*ranks, alone])


@pytest.mark.usefixtures("no_fallback")
def test_a_slow_read_is_counted_by_every_rank(folder: Path) -> None:
    ticks = [count(0, 7), count(0, 0)]
    problems = [DataProblems(BadShards.STOP) for _ in range(2)]
    shards = [FileShard(path=folder / f"{name}.jsonl", text_field="text") for name in "ab"]
    ranks = [
        DocumentStream(
            shards, tokenizer_named("bytes"), problems[rank], length=64, seed=0, workers=1, local_rank=rank,
            local_size=2, clock=lambda rank=rank: float(next(ticks[rank])),
        )
        for rank in range(2)
    ]  # fmt: skip
    at_once(ranks, lambda rank: [rank.next_row() for _ in range(100)])
    for rank in ranks:
        rank.close()
    first, second = (one.summary()["slow"] for one in problems)
    assert second
    assert all(first[name] >= times for name, times in second.items())


@pytest.mark.usefixtures("no_fallback")
def test_a_rank_that_waits_for_another_can_be_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    batches = loader(folder, rank=1, size=2)
    asked, receive = threading.Event(), SharedBlocks.receive

    def noted(blocks: SharedBlocks) -> None:
        asked.set()
        receive(blocks)

    monkeypatch.setattr(SharedBlocks, "receive", noted)

    def ask() -> None:
        with suppress(StopIteration):
            batches.wait_for_first()

    threading.Thread(target=ask, daemon=True).start()
    assert asked.wait(100)
    wait_for(lambda: batches._source._blocks is not None, "the stream")  # which is set after its threads have begun
    threads = [one for one in set(threading.enumerate()) - before if one.name.startswith("nsa-loader")]
    assert threads
    batches.close()
    assert not any(thread.is_alive() for thread in threads)


class Pair:
    """Two ranks at their border: the first offers, the second takes."""

    def __init__(self, **changed: Any) -> None:
        common = {"size": 2, "shards": 1, "vocab": 256, "identity": "data", **changed}
        self.shared = [SharedBlocks(rank=rank, **common) for rank in range(2)]
        self.owner, self.other = (one.start() for one in self.shared)

    def offer(self, block: int, texts: tuple[bytes, ...] = (b"one", b"", b"three")) -> None:
        documents = [np.frombuffer(text, np.uint8) for text in texts]
        self.owner.begin(0, 0, block)
        self.owner.offer(0, 0, block, SharedBlock(reading=READING, documents=documents, bad_records=[(1, "bad")]))

    def close(self) -> None:
        for session, shared in zip((self.owner, self.other), self.shared, strict=True):
            session.close()
            shared.forget_before((9, 0, 0, 0))


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.mark.usefixtures("no_fallback")
class TestAnOwner:
    def test_provides_the_block_as_it_is(self, pair: Pair) -> None:
        pair.offer(0)
        content = pair.other.take(0, 0, 0)
        assert content is not None
        assert (content.reading, content.bad_records) == (READING, [(1, "bad")])
        assert [bytes(document) for document in content.documents] == [b"one", b"", b"three"]

    def test_is_waited_for_as_long_as_it_tokenizes(self, pair: Pair) -> None:
        pair.other._patience_s[0] = 0.0
        pair.owner.begin(0, 0, 0)
        offering = threading.Timer(0.3, pair.offer, [0])
        offering.start()
        assert pair.other.take(0, 0, 0) is not None
        offering.join()

    def test_says_that_it_has_no_such_block(self, pair: Pair) -> None:
        pair.owner.begin(0, 0, 0)
        pair.owner.offer(0, 0, 0, None)
        assert pair.other.take(0, 0, 0) is None

    def test_frees_the_blocks_that_the_other_has_passed(self, pair: Pair) -> None:
        for block in range(4):
            pair.offer(block)
        assert pair.other.take(0, 0, 2) is not None
        assert pair.other.take(0, 0, 3) is not None
        assert pair.shared[1].received == {}

    @pytest.mark.parametrize("message", [b"", b"short", b"\xff" * 76, b"\xff" * 500])
    def test_is_heard_behind_any_message(self, pair: Pair, message: bytes) -> None:
        descriptors = set(os.listdir("/proc/self/fd"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            for files in ([], [0, 1], [2]):
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else []
                client.sendmsg([message], rights, 0, pair.shared[1].address(1))
        pair.offer(0)
        assert pair.other.take(0, 0, 0) is not None
        assert set(os.listdir("/proc/self/fd")) == descriptors

    def test_of_another_user_is_not_heard(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        pair.offer(0)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        pair.other._patience_s[0] = 0.1
        assert pair.other.take(0, 0, 0) is None


def test_waits_for_a_rank_that_is_always_late_get_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_blocks, "WAIT_S", 0.08)
    pair = Pair()
    for block in range(5):
        assert pair.other.take(0, 0, block) is None
    assert pair.other._patience_s[0] == pytest.approx(0.08 / 32)
    pair.offer(5)
    assert pair.other.take(0, 0, 5) is not None
    assert pair.other._patience_s[0] == 0.08
    pair.close()


def test_a_block_that_is_too_large_is_not_offered(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_blocks, "MOST_BYTES", 10)
    pair.offer(0)
    assert pair.other.take(0, 0, 0) is None


GOING_ON = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
import torch
from nsa_attention.data import Batches, shared_blocks
from nsa_attention.settings import read_settings
from nsa_attention.world import World

shared_blocks.WAIT_S = 100.0
rank = int(os.environ["RANK"])
world = World(rank=rank, local_rank=rank, size=2, device=torch.device("cpu"), backend=None, local_size=2)
batches = Batches(read_settings(sys.argv[1:], {}), world)
for step in range(400):
    batches.fetch()
    if step == 20:
        Path(f"own{rank}").write_text("@" + batches._source._shared.address(rank)[1:].decode())
        Path(f"own{rank}").rename(f"rank{rank}")
        while not Path("go").exists():
            pass
batches.close()
"""


def test_a_killed_rank_leaves_nothing_and_the_other_goes_on(tmp_path: Path, folder: Path) -> None:
    (program := tmp_path / "going_on.py").write_text(GOING_ON)
    words = (str(program), str(ROOT / "nsa"), "--data", str(folder), "--bad-shards", "skip", "--seq-len", "64")
    ranks = fork_ranks(2, *words, boards=None, cwd=tmp_path, LOCAL_WORLD_SIZE="2")
    wait_for(lambda: (tmp_path / "rank0").exists() and (tmp_path / "rank1").exists(), "both have begun")
    opened = {(tmp_path / f"rank{rank}").read_text() for rank in range(2)}
    assert opened <= addresses()
    os.kill(ranks[0].pid, signal.SIGKILL)
    assert ended(ranks[0]).status != 0
    (tmp_path / "go").touch()
    other = ended(ranks[1])
    assert (other.status, other.err) == (0, "")
    assert other.out.count("[DATA] rank=1 reads blocks of another rank itself: local rank 0: ") == 1
    assert not opened & addresses()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["go", "going_on.py", "rank0", "rank1"]


def addresses() -> set[str]:
    """The sockets of all ranks, in the table of the kernel."""
    words = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
    return {word[-1] for word in words if "@nsa-data-" in word[-1]}
