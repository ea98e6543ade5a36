"""Tile sizes: the first that fits, or the fastest where a warm-up has measured them; the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.errors import OutOfResources, PTXASError

from nsa_attention.ops.fused import importance, lists, selected, spanned, tuning
from nsa_attention.ops.fused.backend import FusedBackend
from nsa_attention.ops.fused.launch import Tile, next_power_of_two
from nsa_attention.ops.fused.tuning import TuningKey
from nsa_attention.ops.selection import Selection

TILES = [Tile(rows=rows, keys=64) for rows in (128, 64, 32)]
HERE = TuningKey(
    kernel="k",
    pattern="sliding w=512",
    device="NVIDIA H200",
    capability=90,
    dtype="bfloat16",
    heads=16,
    width=128,
    value_width=128,
    tokens=64,
    keys=64,
)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before, ran = dict(tuning._tiles), dict(tuning._compiled_for)
    tuning.clear()
    yield
    tuning.clear()
    tuning._tiles.update(before)
    tuning._compiled_for.update(ran)


@pytest.fixture
def milliseconds(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """What each number of rows takes on the GPU that is not here."""
    taken = {128: 3.0, 64: 1.0, 32: 2.0}

    def time(run: Callable[[Tile], None], tile: Tile) -> float:
        run(tile)
        return taken[tile.rows]

    monkeypatch.setattr(tuning, "_milliseconds", time)
    return taken


NO_ROOM = OutOfResources(required=1, limit=0, name="shared memory")


class Kernel:
    """Remembers the tiles that it ran with; those with more rows than fit raise what Triton raises."""

    def __init__(self, most_rows: int = 999, error: Exception = NO_ROOM) -> None:
        self.most_rows, self.error, self.ran = most_rows, error, list[int]()

    def __call__(self, tile: Tile) -> None:
        if tile.rows > self.most_rows:
            raise self.error
        self.ran.append(tile.rows)

    def best(self, times: int = 1) -> list[int]:
        for _ in range(times):
            tuning.run_best(self, HERE, lambda _: TILES)
        return self.ran


@pytest.mark.usefixtures("milliseconds")
def test_nothing_is_timed_outside_of_a_warm_up() -> None:
    with tuning.measuring():
        pass
    assert Kernel().best(times=2) == [128, 128]


@pytest.mark.usefixtures("milliseconds")
def test_a_warm_up_keeps_the_fastest_tile_that_fits() -> None:
    with tuning.measuring():
        assert Kernel().best() == [128, 64, 32, 64]
    assert Kernel().best(times=2) == [64, 64]
    tuning.clear()
    with tuning.measuring():
        assert Kernel(most_rows=32).best() == [32, 32]


@pytest.mark.usefixtures("milliseconds")
def test_what_is_timed_may_be_a_trial_and_then_the_kernel_runs_once() -> None:
    kernel, trial = Kernel(), Kernel()
    with tuning.measuring():
        tuning.run_best(kernel, HERE, lambda _: TILES, trial)
    tuning.run_best(kernel, HERE, lambda _: TILES, trial)
    assert (kernel.ran, trial.ran) == ([64, 64], [128, 64, 32])


@pytest.mark.usefixtures("milliseconds")
@pytest.mark.parametrize("error", [NO_ROOM, PTXASError("no such instruction"), RuntimeError("PassManager::run failed")])
def test_a_tile_that_does_not_fit_or_cannot_be_compiled_is_passed_over(error: Exception) -> None:
    assert Kernel(most_rows=64, error=error).best(times=2) == [64, 64]
    tuning.clear()
    with tuning.measuring():
        assert Kernel(most_rows=32, error=error).best() == [32, 32]


@pytest.mark.usefixtures("milliseconds")
def test_an_error_of_the_device_is_none_of_a_tile() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory"):
        Kernel(most_rows=64, error=error).best()
    with pytest.raises(RuntimeError, match="illegal memory"), tuning.measuring():
        Kernel(most_rows=64, error=error).best()


@pytest.mark.usefixtures("milliseconds")
def test_where_no_tile_fits_the_error_is_triton_s() -> None:
    with pytest.raises(OutOfResources):
        Kernel(most_rows=1).best()
    with pytest.raises(OutOfResources), tuning.measuring():
        Kernel(most_rows=1).best()


def test_what_another_rank_has_measured_is_what_runs() -> None:
    Kernel().best()
    rows = json.loads(json.dumps(tuning.table()))
    rows[0][1] = [32, 64, 4, 2]
    tuning.adopt(rows)
    assert Kernel().best() == [32]


def test_rows_that_are_not_understood_are_left_out() -> None:
    Kernel().best()
    good = tuning.table()
    tuning.clear()
    tuning.adopt([None, [{"kernel": "k"}, [1, 2, 3, 4]], [{}, 7], *good])
    assert tuning.table() == good
    tuning.adopt("nonsense")
    assert tuning.table() == good


def test_choices_are_kept_in_a_file_with_those_of_other_processes(tmp_path: Path) -> None:
    file = tmp_path / "nsa" / "tuning.json"
    tuning.load(file)
    assert tuning.table() == []
    Kernel().best()
    tuning.save(file)
    first = tuning.table()
    tuning.clear()
    tuning.run_best(Kernel(), replace(HERE, kernel="another"), lambda _: TILES)
    own = tuning.table()
    tuning.save(file)
    tuning.clear()
    tuning.load(file)
    assert sorted(map(str, tuning.table())) == sorted(map(str, [*own, *first]))
    file.write_text("{", encoding="utf-8")
    tuning.load(file)
    assert len(tuning.table()) == 2


def test_rows_of_a_table_with_other_fields_are_left_out_and_the_others_read() -> None:
    """As tables have it that were kept before branches and their lengths were told apart."""
    old = {name: value for name, value in vars(HERE).items() if name not in ("pattern", "keys")}
    tuning.adopt(
        [[old, [128, 64, 8, 2]], [vars(HERE) | {"pattern": []}, [128, 64, 8, 2]], [vars(HERE), [64, 64, 4, 2]]]
    )
    assert tuning.table() == [[vars(HERE), [64, 64, 4, 2]]]


def settled(monkeypatch: pytest.MonkeyPatch) -> list[TuningKey]:
    """The situations that are asked for from here on. Nothing is computed: to be asked for is all that counts."""
    seen: list[TuningKey] = []

    def run(
        run: Callable[[Tile], None],
        tuning_key: TuningKey,
        candidates: Callable[[TuningKey], list[Tile]],
        _trial: Callable[[Tile], None] | None = None,
    ) -> None:
        seen.append(tuning_key)
        run(candidates(tuning_key)[0])

    for module in (tuning, importance):
        monkeypatch.setattr(module, "run_best", run)
    for module in (importance, lists, selected, spanned):
        monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    return seen


def asked(seen: list[TuningKey], **numbers: int) -> set[TuningKey]:
    """What a pass over these lengths asks for, all kernels."""
    of = {"tokens": 40, "l": 6, "d": 3, "size": 5, "n": 4, "w": 7} | numbers
    seen.clear()
    tokens, blocks = of["tokens"], (of["tokens"] - of["l"]) // of["d"] + 1
    q, cmp, sel = (torch.zeros(1, 1, length, 16, requires_grad=True) for length in (tokens, blocks, tokens))
    numbers_of_cmp = {"block_len": of["l"], "block_stride": of["d"]}
    selection = Selection(**numbers_of_cmp, select_len=of["size"], select_count=of["n"], scale=1.0)
    fused, indices = FusedBackend(), torch.zeros(1, 1, tokens, of["n"], dtype=torch.int32)
    outputs = [
        fused.attend_compressed(q, cmp, cmp, **numbers_of_cmp, scale=1.0)[0],
        fused.attend_selected(q, sel, sel, indices, select_len=of["size"], scale=1.0)[0],
        fused.attend_sliding(q, sel, sel, window=of["w"], scale=1.0)[0],
    ]
    fused.select(q.detach(), cmp.detach(), torch.zeros(1, 1, tokens), selection)
    torch.stack(outputs).sum().backward()
    return set(seen)


def test_every_number_that_a_good_tile_depends_on_is_one_of_its_situation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = settled(monkeypatch)
    before = asked(seen)
    assert len(before) == 10  # two branches of spans and the selected one, forward and twice backward, and the ranking
    names = {name: {one.pattern.split()[0] for one in before - asked(seen, **number)} for name, number in {
        "l": {"l": 7}, "d": {"d": 2}, "size": {"size": 6}, "n": {"n": 5}, "w": {"w": 8}, "tokens": {"tokens": 80},
    }.items()}  # fmt: skip
    assert names == {
        "l": {"compressed", "ranked"},
        "d": {"compressed", "ranked"},
        "size": {"selected", "ranked"},
        "n": {"selected", "ranked"},
        "w": {"sliding"},
        "tokens": {"compressed", "selected", "sliding", "ranked"},
    }
    assert asked(seen, tokens=41) == before  # of one length class


def test_choices_of_the_interpreter_are_not_kept() -> None:
    tuning.run_best(Kernel(), replace(HERE, device="cpu"), lambda _: TILES)
    assert tuning.table() == []


class TestALengthThatNothingWasMeasuredFor:
    """Inside a step nothing is compiled: what ran here is taken before what is known to be better."""

    @pytest.fixture(autouse=True)
    def warm(self, milliseconds: dict[int, float]) -> None:
        with tuning.measuring():
            Kernel().best()
            milliseconds.update({128: 1.0, 64: 3.0})
            tuning.run_best(Kernel(), replace(HERE, tokens=1024, keys=1024), lambda _: TILES)

    def rows(self, **of: object) -> int:
        kernel = Kernel()
        tuning.run_best(kernel, replace(HERE, **of), lambda _: TILES)
        (rows,) = kernel.ran
        return rows

    def test_takes_the_tile_of_the_nearest_that_ran(self) -> None:
        assert self.rows(tokens=128, keys=128) == 64
        assert self.rows(tokens=512, keys=512) == 128
        assert self.rows(tokens=65536, keys=65536) == 128
        assert self.rows(tokens=1, keys=1) == 64

    def test_and_is_no_neighbour_itself_and_no_row_of_the_table(self) -> None:
        before = tuning.table()
        assert self.rows(tokens=256, keys=128) == 64
        assert self.rows(tokens=512, keys=256) == 128  # by the one of 1024, though one of 256 ran meanwhile
        assert tuning.table() == before

    def test_even_where_an_earlier_run_measured_it(self) -> None:
        tuning.adopt([[vars(replace(HERE, tokens=512, keys=512)), [32, 64, 4, 2]]])
        assert self.rows(tokens=512, keys=512) == 128

    def test_unless_it_is_of_another_kernel_or_shape(self) -> None:
        assert self.rows(pattern="sliding w=64") == 128  # the first that fits
        tuning.adopt([[vars(replace(HERE, width=64)), [32, 64, 4, 2]]])
        assert self.rows(width=64) == 32

    def test_and_is_measured_in_a_warm_up(self) -> None:
        assert self.rows(tokens=256, keys=256) == 64
        with tuning.measuring():
            kernel = Kernel()
            tuning.run_best(kernel, replace(HERE, tokens=256, keys=256), lambda _: TILES)
        assert kernel.ran == [128, 64, 32, 128]

    def test_takes_what_rank_0_has_measured(self) -> None:
        tuning.adopt([[vars(HERE), [32, 64, 4, 2]]])
        assert self.rows() == 32


@given(width=st.integers(0, 1 << 40))
def test_a_padded_width_is_the_next_power_of_two(width: int) -> None:
    assert next_power_of_two(width, least=1) == max(1, triton.next_power_of_2(width))
    assert next_power_of_two(width) == max(16, triton.next_power_of_2(width))
