"""Batches: one order for all ranks, workers and world sizes, the position in it, and rows of documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, Alone, Program
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_forks

from nsa_attention.data import IGNORED, Batch, Batches, shipped_text
from nsa_attention.data.packing import row_of_window, rows
from nsa_attention.data.prefetch import OrderedPrefetch
from nsa_attention.data.stories import SHARDS, all_stories, story
from nsa_attention.settings import read_settings
from nsa_attention.world import MAX_COMPARED, CannotRunError, World

CPU = torch.device("cpu")
SHORT = ("--seq-len", "32", "--batch", "2")


def loader(*options: str, rank: int = 0, size: int = 1) -> Batches:
    world = World(rank=rank, local_rank=rank, size=size, device=CPU, backend=None)
    return Batches(read_settings((*SHORT, *options), {}), world)


def fetched(batches: Batches, number: int) -> list[Batch]:
    return [batches.fetch() for _ in range(number)]


def global_rows(number: int, *options: str, size: int, state: dict[str, Any] | None = None) -> list[list[int]]:
    """The first tokens of the rows of so many micro-batches, as all ranks together see them."""
    ranks = [loader(*options, rank=rank, size=size) for rank in range(size)]
    found = []
    for batches in ranks:
        if state is not None:
            batches.load_state_dict(json.loads(json.dumps(state)))
    for _ in range(number):
        found += [row for batches in ranks for row in batches.fetch().tokens.tolist()]
    for batches in ranks:
        batches.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of three kinds, with more documents than are shuffled together."""
    place = tmp_path_factory.mktemp("shards")
    texts = [story(number) for number in range(400)]
    lines = [json.dumps({"text": text, "id": number}) for number, text in enumerate(texts)]
    (place / "a.jsonl").write_text("\n".join(lines[:300]) + "\n", encoding="utf-8")
    (place / "b.jsonl").write_text("\n".join(lines[300:]), encoding="utf-8")
    (place / "c.txt").write_text("".join(texts[:3]), encoding="utf-8")
    return place


def of_before(step: int, micro: int, rank: int, seed: int, draw: Callable[..., torch.Tensor]) -> torch.Tensor:
    """How a batch was drawn before there were files and positions: recorded runs rest on it."""
    number = seed
    for part in (step, micro, rank):
        number = (number * 1_000_003 + part + 1) % (1 << 63)
    return draw(generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("workers", ["0", "3"])
def test_random_tokens_and_windows_of_a_text_are_the_batches_they_always_were(tmp_path: Path, workers: str) -> None:
    text = torch.tensor(list(shipped_text()))
    (tmp_path / "own.txt").write_bytes(shipped_text()[:5000])

    def windows(content: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda **given: content[torch.randint(len(content) - 32, (2, 1), **given) + torch.arange(33)]

    draws = {
        "synthetic": lambda **given: torch.randint(256, (2, 33), **given),
        "text": windows(text),
        str(tmp_path / "own.txt"): windows(text[:5000]),
    }
    for data, draw in draws.items():
        for rank in (0, 1):
            batches = loader(
                "--data", data, "--seed", "5", "--accumulate", "2", "--workers", workers, rank=rank, size=2
            )
            for step, micro in ((1, 0), (1, 1), (2, 0), (2, 1)):
                expected, batch = of_before(step, micro, rank, 5, draw), batches.fetch()
                assert torch.equal(batch.tokens, expected[:, :-1])
                assert torch.equal(batch.targets, expected[:, 1:])
                assert batch.lengths is None
                assert batch.counted == 64
            batches.close()


EVERY_KIND = ["synthetic", "text", "stories", "folder", "tokens"]


@pytest.fixture
def data(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(folder)
    if request.param == "tokens":
        tokens = np.random.default_rng(0).integers(1, 256, 3000).astype("<u2")
        tokens[::25] = 0  # also at the end of a row, now and then
        (tmp_path / "train.bin").write_bytes(tokens.tobytes())
        (tmp_path / "meta.json").write_text(json.dumps({"dtype": "uint16", "vocab": 256, "end": 0}))
        return str(tmp_path)
    return str(request.param)


@pytest.mark.parametrize("data", EVERY_KIND, indirect=True)
class TestEverySource:
    def test_has_one_order_for_any_number_of_workers(self, data: str) -> None:
        runs = [global_rows(12, "--data", data, "--workers", str(workers), size=1) for workers in (0, 1, 4)]
        assert runs[0] == runs[1] == runs[2]
        assert runs[0] != global_rows(12, "--data", data, "--seed", "1", size=1)

    def test_goes_on_at_another_world_size_with_the_same_order(self, data: str) -> None:
        whole = global_rows(24, "--data", data, size=1)
        for size, other in ((1, 2), (2, 1), (2, 4)):
            before = [loader("--data", data, rank=rank, size=size) for rank in range(size)]
            expected = global_rows(24 // size, "--data", data, size=size)
            begun = [row for _ in range(12 // size) for batches in before for row in batches.fetch().tokens.tolist()]
            states = [batches.state_dict() for batches in before]
            assert all(state == states[0] for state in states)
            gone_on = global_rows(12 // other, "--data", data, size=other, state=states[0])
            assert begun + gone_on == expected
            if data not in ("synthetic", "text"):  # whose ranks draw apart from each other, as they always did
                assert expected == whole
            for batches in before:
                batches.close()

    def test_goes_on_from_a_position_as_if_nothing_had_happened(self, data: str) -> None:
        whole = loader("--data", data)
        expected = fetched(whole, 30)
        for at in (0, 1, 17):
            first, second = loader("--data", data), loader("--data", data, "--workers", "3")
            first.wait_for_first()  # what was read ahead is no part of the position
            fetched(first, at)
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            for ours, theirs in zip(fetched(second, 30 - at), expected[at:], strict=True):
                assert torch.equal(ours.tokens, theirs.tokens)
                assert torch.equal(ours.targets, theirs.targets)
                assert ours.lengths == theirs.lengths
            assert second.state_dict() == (whole.state_dict() if at == 17 else second.state_dict())
            first.close()
            second.close()
        whole.close()

    def test_has_targets_that_are_the_next_tokens_of_the_same_document(self, data: str) -> None:
        batches = loader("--data", data)
        for batch in fetched(batches, 50):
            kept = batch.targets != IGNORED
            assert int(kept.sum()) == batch.counted
            inside = kept[:, :-1]
            assert torch.equal(batch.targets[:, :-1][inside], batch.tokens[:, 1:][inside])
            if batch.lengths is not None:
                assert sum(batch.lengths) == batch.tokens.numel()
                ends = torch.tensor(batch.lengths).cumsum(0) - 1
                # Zero ends a document and stands nowhere else; a row ends one only where its text goes on in the next.
                assert torch.equal(kept, batch.tokens != 0)
                of_zero = (batch.tokens.flatten() == 0).nonzero().flatten()
                of_row = torch.arange(31, batch.tokens.numel(), 32)
                assert torch.equal(ends, torch.cat((of_zero, of_row)).unique())
            else:
                assert bool(kept.all())
        batches.close()


def test_a_position_in_other_data_is_refused_with_every_difference(folder: Path) -> None:
    state = loader("--data", str(folder)).state_dict()
    with pytest.raises(CannotRunError) as caught:
        loader("--data", "stories", "--seed", "1").load_state_dict(state)
    lines = str(caught.value).splitlines()
    assert lines[0] == "--resume: the data position belongs to seed 0, this run has 1"
    assert lines[1] == "--resume: the data position belongs to shards 3, this run has 16"
    assert len(lines) == 3
    with pytest.raises(CannotRunError, match="the data position has format version 7, not 1"):
        loader().load_state_dict({**state, "version": 7})


def test_every_document_of_an_epoch_comes_once_and_each_epoch_has_an_order_of_its_own(folder: Path) -> None:
    batches = loader("--data", str(folder), "--packing", "stream", "--batch", "1")
    size = sum(len(path.read_bytes()) for path in [folder / "c.txt"])
    texts = [json.loads(line)["text"] for name in "ab" for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    total = size + 1 + sum(len(text) + 1 for text in texts)
    stream = b"".join(bytes(batch.tokens[0].tolist()) for batch in fetched(batches, 2 * total // 32))
    first, second = stream[:total], stream[total : 2 * total]
    whole = [*texts, (folder / "c.txt").read_text()]
    assert sorted(first.split(b"\0")[:-1]) == sorted(text.encode() for text in whole)
    assert second[:2000] != first[:2000]
    batches.close()


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30), length=st.integers(1, 12), data=st.data())
def test_rows_cut_a_line_of_documents_and_go_on_from_each_cursor(
    lengths: list[int], length: int, data: st.DataObject
) -> None:
    numbers = count()
    documents = [
        (place, np.array([next(numbers) for _ in range(size)], np.uint32)) for place, size in enumerate(lengths)
    ]
    line = np.concatenate([tokens for _, tokens in documents])
    owner = np.concatenate([np.full(size, place) for place, size in enumerate(lengths)])
    cut = list(rows(documents, length))
    assert len(cut) == max(0, (len(line) - 1) // length)
    for number, (row, _) in enumerate(cut):
        first = number * length
        assert row.tokens.tolist() == line[first : first + length + 1].tolist()
        of_row = owner[first : first + length]
        assert row.lengths == tuple(int((of_row == place).sum()) for place in dict.fromkeys(of_row.tolist()))
        assert row.goes_on == (owner[first + length - 1] == owner[first + length])
    if cut:
        at = data.draw(st.integers(0, len(cut) - 1))
        cursor = cut[at][1]
        later = list(rows(documents[cursor.place :], length, cursor.token))
        assert [row.tokens.tolist() for row, _ in later] == [row.tokens.tolist() for row, _ in cut[at + 1 :]]
        assert [row.lengths for row, _ in later] == [row.lengths for row, _ in cut[at + 1 :]]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_a_window_is_cut_behind_each_token_that_ends_a_document(window: list[int]) -> None:
    row = row_of_window(np.array(window, np.uint16), 0)
    assert sum(row.lengths) == len(window) - 1
    ends = np.cumsum(row.lengths)
    assert [int(end) for end in (ends[:-1] if row.goes_on else ends)] == [
        place + 1 for place, token in enumerate(window[:-1]) if token == 0
    ]


class TestWorkDoneAhead:
    @pytest.mark.parametrize("workers", [0, 1, 3])
    def test_comes_in_the_order_of_its_items(self, workers: int) -> None:
        work = OrderedPrefetch(iter(range(200)), lambda item: item * item, workers=workers, ahead=5, name="test")
        assert list(work) == [item * item for item in range(200)]
        work.close()

    @pytest.mark.parametrize("workers", [1, 4])
    def test_is_never_far_ahead(self, workers: int) -> None:
        drawn = []
        work = OrderedPrefetch(
            (drawn.append(n) or n for n in count()), lambda item: item, workers=workers, ahead=4, name="test"
        )
        for taken in range(100):
            assert next(work) == taken
            assert len(drawn) <= taken + 1 + 4 + workers
        work.close()

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("place", ["drawing", "work"])
    def test_hands_on_an_error_in_its_place(self, workers: int, place: str) -> None:
        def items() -> Iterator[int]:
            yield from (0, 1)
            if place == "drawing":
                raise CannotRunError("planted")
            yield 2

        def fail_at_two(item: int) -> int:
            if item == 2:
                raise CannotRunError("planted")
            return item

        work = OrderedPrefetch(items(), fail_at_two, workers=workers, ahead=4, name="test")
        assert [next(work), next(work)] == [0, 1]
        with pytest.raises(CannotRunError, match="planted"):
            next(work)
        work.close()

    def test_leaves_no_thread_behind(self) -> None:
        work = OrderedPrefetch(count(), lambda item: item, workers=3, ahead=4, name="test")
        threads = list(work._threads)
        assert next(work) == 0
        work.close()
        assert not any(thread.is_alive() for thread in threads)


def test_the_stories_are_five_megabytes_of_english_that_never_change() -> None:
    texts = [text for shard in all_stories() for text in shard.records()]
    assert sum(len(text) for text in texts) > 5_000_000
    assert len(set(texts)) == len(texts) == SHARDS * 500
    assert all(text.isascii() for text in texts)
    assert story(0).splitlines()[0] == FIRST_TITLE


FIRST_TITLE = "Rosa and the beautiful coat"


def losses(directory: Path) -> list[float]:
    rows = (directory / "out" / "training.csv").read_text(encoding="utf-8").splitlines()[1:]
    return [float(row.split(",")[1]) for row in rows]


def test_a_run_on_documents_says_what_it_does_and_writes_it_down(alone: Alone, tmp_path: Path, folder: Path) -> None:
    status, output, _ = alone("--layers", "1", "--data", str(folder), "--steps", "2", "--accumulate", "2")
    assert status == 0
    ready = next(line for line in output.splitlines() if "loader ready" in line)
    assert ready.endswith(" s: documents, packing documents, 2 workers")
    assert "torch.int64 documents=" in output
    report = json.loads((tmp_path / "out" / "loader_rank0.json").read_text())
    assert (report["batches"], report["rows"], report["left_out"]) == (4, 8, {})
    assert 0 < report["ready_s"] < 60
    beats = (tmp_path / "out" / "heartbeat_rank0.jsonl").read_text().splitlines()
    assert [json.loads(beat)["phase"] for beat in beats] == ["start", "loader", "step", "step"]


def test_a_run_resumed_on_documents_is_the_one_that_was_not_interrupted(alone: Alone, tmp_path: Path) -> None:
    common = ("--layers", "1", "--data", "stories")
    assert alone(*common, "--steps", "4", "--out-dir", "whole/out")[0] == 0
    assert alone(*common, "--steps", "2", "--checkpoint-every", "2")[0] == 0
    assert alone(*common, "--steps", "4", "--resume", "out")[0] == 0
    assert losses(tmp_path) == losses(tmp_path / "whole")


def test_the_loss_of_documents_is_that_of_one_process_for_two_ranks_and_for_micro_batches(
    two_ranks: Program, alone: Alone, tmp_path: Path
) -> None:
    """Ranks and micro-batches count different numbers of targets; a mean of means would be another loss."""
    common = ("--layers", "1", "--data", "stories", "--dtype", "float64", "--steps", "3", "--seq-len", "128")
    assert alone(*common, "--batch", "4", "--out-dir", "one/out")[0] == 0
    assert alone(*common, "--batch", "1", "--accumulate", "4", "--out-dir", "four/out")[0] == 0
    done = two_ranks(*common, "--wrapper", "ddp", "--accumulate", "2", "--batch", "1")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


OWN_DISK = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
os.chdir("rank" + os.environ["RANK"])
from nsa_attention.train import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_what_one_rank_alone_leaves_out_ends_the_run_on_all(tmp_path: Path, *, damaged: bool) -> None:
    """Each goes on with other rows than the batch has for it: some are trained on twice, some by nobody."""
    for rank in range(2):
        (folder := tmp_path / f"rank{rank}" / "texts").mkdir(parents=True)
        lines = [json.dumps({"text": f"{number} of many. " * 60}) for number in range(40)]
        lines[3:6] = ["no json"] * 3 if damaged and rank else lines[3:6]
        (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    (program := tmp_path / "own_disk.py").write_text(OWN_DISK)
    words = (str(program), str(ROOT / "src"), "--layers", "1", "--steps", "12", "--data", "texts")
    ranks = run_forks(2, *words, "--bad-shards", "skip", "--wrapper", "ddp", boards=None, cwd=tmp_path)
    said = [rank.err for rank in ranks]
    assert [rank.status for rank in ranks] == ([2, 2] if damaged else [0, 0]), said
    if damaged:
        assert all("the ranks no longer read the same data: rank" in one for one in said)
        assert "rank 0 is at epoch 0" in said[0]
        assert "nothing skipped" in said[0]
        assert "3 records skipped: " in said[1]


@given(
    st.integers(1, 4000).flatmap(lambda size: st.lists(st.integers(0, MAX_COMPARED - 1), min_size=size, max_size=size))
)
def test_numbers_of_ranks_are_compared_exactly_in_float32(numbers: list[int]) -> None:
    sums = torch.zeros(2)
    for number in numbers:
        sums += torch.tensor([number, number**2], dtype=torch.float32)
    assert (int(sums[1]) * len(numbers) == int(sums[0]) ** 2) == (len(set(numbers)) == 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--data", "text", "--packing", "documents", "--attention", "stock"),
            "--packing: --attention stock cannot separate documents",
        ),
        (
            ("--data", "stories", "--packing", "documents", "--compile"),
            "--packing: document lengths differ in each step",
        ),
        (
            ("--packing", "documents"),
            "--packing documents: nothing in --data synthetic marks where a document ends; use",
        ),
        (("--tokenizer", "nowhere.json"), "--tokenizer: expected bytes or the path of a tokenizer.json or a file of"),
        (("--data", "hf:"), '--data: expected hf:PATH, hf:PATH:CONFIG or hf:PATH:CONFIG:SPLIT, got "hf:"'),
        (
            ("--data", "no*.jsonl"),
            "--data: expected synthetic, text, stories, hf:PATH, or the path of a file, a folder",
        ),
        (("--bad-shards", "keep"), '--bad-shards: expected skip or stop, got "keep"'),
        (("--workers", "-1"), '--workers: expected a whole number of at least 0, got "-1"'),
    ],
)
def test_data_that_cannot_be_is_one_line_and_exit_status_2(
    alone: Alone, options: tuple[str, ...], message: str
) -> None:
    status, _, error = alone(*options)
    assert status == 2
    assert error.startswith(f"nsa.train: error: {message}")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("attention", ["vanilla", "stock"])
def test_the_controls_train_on_documents_each_as_it_can(alone: Alone, attention: str) -> None:
    status, output, _ = alone("--layers", "1", "--data", "stories", "--attention", attention)
    assert status == 0
    assert f"packing {'stream' if attention == 'stock' else 'documents'}" in output
