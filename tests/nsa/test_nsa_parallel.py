"""However a model is spread over ranks, cut into micro-batches or compiled: it computes what one process computes."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Alone, Program, forked
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel
from wrapped_gradients import ONE_OF_EACH, REST, WAYS, compare

from nsa_attention.attention import NSAttention
from nsa_attention.config import CI, Attention, Branch
from nsa_attention.model import Recompute, StockBlock, TinyLM
from nsa_attention.observe import ViewGradientTrace
from nsa_attention.ops.selection import RANKERS
from nsa_attention.parallelize import checkpoint_layers, compile_layers
from nsa_attention.telemetry import Telemetry
from nsa_attention.world import CannotRunError, World, join_ranks

LINES = "[GRAD-TRACE] after_backward_step"


@pytest.fixture(scope="module")
def first(nsa_ranks: Callable[..., Any]) -> dict[str, Any]:
    """What two ranks have to measure, in one launch."""
    return nsa_ranks(compare, "first", backend=None)[0]


@pytest.fixture(scope="module")
def rest(nsa_ranks: Callable[..., Any]) -> dict[str, Any]:
    return nsa_ranks(compare, "rest", backend=None)[0]


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> dict[str, Any]:
    slow = request.node.get_closest_marker("slow") is not None
    result: dict[str, Any] = request.getfixturevalue("rest" if slow else "first")
    return result


SOME = [*ONE_OF_EACH, *(pytest.param(way, marks=pytest.mark.slow) for way in REST)]


class TestTwoRanksComputeTheGradientsOfOneProcess:
    @pytest.mark.parametrize("way", WAYS)
    def test_in_float64(self, measured: dict[str, Any], way: str) -> None:
        assert measured["float64"][way] < 1e-10

    @pytest.mark.parametrize("way", SOME)
    def test_in_float32_when_they_read_the_same_blocks(self, measured: dict[str, Any], way: str) -> None:
        assert 0 < measured["float32"][way] < 1e-5

    @pytest.mark.parametrize("way", SOME)
    def test_with_torchs_own_layers(self, measured: dict[str, Any], way: str) -> None:
        assert measured["stock"][way] < 1e-10


def test_gradients_that_travel_as_bfloat16_are_rounded_twice_and_no_more(measured: dict[str, Any]) -> None:
    assert measured["bf16_mean_is_exact"]
    assert 1e-4 < measured["bf16_hook"] < 2**-7


def losses(directory: Path) -> list[float]:
    rows = (directory / "training.csv").read_text(encoding="utf-8").splitlines()[1:]
    return [float(row.split(",")[1]) for row in rows]


COMMON = ("--layers", "1", "--dtype", "float64", "--data", "text", "--accumulate", "2")


@pytest.fixture(scope="module")
def ddp_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Four steps of two ranks under DDP, which the other wrappers are compared with."""
    directory = tmp_path_factory.mktemp("ddp")
    done = forked(directory, *COMMON, "--wrapper", "ddp", "--steps", "4")
    assert done.returncode == 0, done.stderr
    return losses(directory / "out")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp1", "fsdp"),
        pytest.param("fsdp", "ddp", marks=pytest.mark.slow),
        pytest.param("ddp", "fsdp1", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_under_another_wrapper_as_if_nothing_had_happened(
    two_ranks: Program, tmp_path: Path, ddp_losses: list[float], before: str, after: str
) -> None:
    start = two_ranks(*COMMON, "--wrapper", before, "--steps", "2", "--checkpoint-every", "2", "--trace-grads")
    assert start.returncode == 0, start.stderr
    assert start.stdout.splitlines().count(f"{LINES}2 arrived=29 missing=0") == 2
    more = ("--wrapper", after, "--steps", "4", "--resume", "out", "--barrier-after-backward")
    end = two_ranks(*COMMON, *more)
    assert end.returncode == 0, end.stderr
    assert losses(tmp_path / "out") == pytest.approx(ddp_losses, rel=1e-5)


@pytest.mark.parametrize("wrapper", ["fsdp", "fsdp1"])
class TestAShardedModelOfOneRank:
    def test_is_traced_like_any_other(self, alone: Alone, tmp_path: Path, wrapper: str) -> None:
        options = ("--layers", "2", "--wrapper", wrapper, "--gc", "all", "--freeze", "blocks.1.attn.gate_mlp.*s*")
        status, output, _ = alone(*options, "--trace-grads", "--trace-module-bwd", "--mem-dump-every", "1")
        assert status == 0
        lines = output.splitlines()
        assert f"{LINES}1 arrived=54 missing=2" in lines
        assert "  - MISSING: blocks.1.attn.gate_mlp.hidden.bias" in lines
        walked = [line.removeprefix("[MODULE-BWD] step=1 ") for line in lines if line.startswith("[MODULE-BWD]")]
        assert {"blocks.1", "blocks.0", "blocks.0.attn", "blocks.0.attn.sel"} <= set(walked)
        tables = {name: (tmp_path / "out" / name).read_text(encoding="utf-8").splitlines() for name in TABLES}
        assert {name: len(table) for name, table in tables.items()} == TABLES
        order = json.loads((tmp_path / "out" / "grad_order_rank0.jsonl").read_text(encoding="utf-8"))
        assert order["arrived"].index("blocks.1.mlp.down.weight") < order["arrived"].index("blocks.0.mlp.down.weight")

    def test_holds_its_weights_in_bfloat16_and_its_angles_in_float32(
        self, alone: Alone, tmp_path: Path, wrapper: str
    ) -> None:
        assert alone("--layers", "1", "--wrapper", wrapper, "--dtype", "bfloat16")[0] == 0
        report = (tmp_path / "out" / "dtypes_report_fsdp.txt").read_text(encoding="utf-8").splitlines()
        assert "parameters torch.float32 29" in report  # what the optimizer sees
        assert "buffers torch.float32 1" in report
        activations = {line.split()[1] for line in report if line.startswith("activation")}
        assert activations == {"torch.bfloat16"}


# Lines with the header: two layers, three branches.
TABLES = {"k_stats_fsdp.csv": 3, "gate_health.csv": 7, "fallback_counters_fsdp.csv": 6}


def test_rotary_angles_are_not_rounded_to_bfloat16_by_a_sharded_model(alone: Alone, tmp_path: Path) -> None:
    """Rounded angles would send distant tokens to the same position; the first loss would show it."""
    common = ("--layers", "1", "--data", "text", "--steps", "3")
    for name, options in (("plain", ()), ("sharded", ("--wrapper", "fsdp", "--dtype", "bfloat16"))):
        assert alone(*common, *options, "--out-dir", name)[0] == 0
    assert losses(tmp_path / "sharded") == pytest.approx(losses(tmp_path / "plain"), rel=2e-3)


def test_an_unused_parameter_is_missing_by_name_under_fsdp1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP1 fills its gradient with zeros, so that only the views tell."""
    from nsa_attention.sharding import shard_by_fsdp1

    bare = TinyLM.from_config(replace(CI, layers=1))
    bare.blocks[0].attn.register_parameter("idle", torch.nn.Parameter(torch.zeros(3)))
    with join_ranks("cpu", "gloo", needs_group=True) as world:
        trace = ViewGradientTrace(bare, tmp_path / "order.jsonl")
        model = shard_by_fsdp1(bare, world, torch.float32)
        model(torch.randint(256, (1, 64))).mean().backward()
    trace.after_backward(1)
    assert capsys.readouterr().out == f"{LINES}1 arrived=29 missing=1\n  - MISSING: blocks.0.attn.idle\n"


def test_a_failed_run_does_not_leave_its_model_as_the_last_owner_of_the_group() -> None:
    """The model would join the threads of gloo with the GIL held, and one of them may need it."""

    def fail() -> None:
        nonlocal group
        with join_ranks("cpu", "gloo", needs_group=True):
            model = DistributedDataParallel(torch.nn.Linear(2, 2))
            group = weakref.ref(torch.distributed.group.WORLD)
            model(torch.ones(1, 2)).sum().backward()
            raise CannotRunError

    group: Callable[[], object] = object
    with pytest.raises(CannotRunError):
        fail()
    gc.collect()
    assert group() is not None


def test_stop_gradient_gates_learn_nothing_and_pass_nothing_on(alone: Alone) -> None:
    status, output, _ = alone("--layers", "1", "--wrapper", "ddp", "--stop-gradient-gates", "--trace-grads")
    assert status == 0
    gates = [f"blocks.0.attn.gate_mlp.{name}" for name in ("weight", "bias", "hidden.weight", "hidden.bias")]
    missing = [line for line in output.splitlines() if "MISSING" in line]
    assert missing == [f"  - MISSING: {name}" for name in gates]


def test_stopped_gates_change_no_output_and_cut_the_gradient_through_them() -> None:
    config = replace(CI, layers=1, branches=(Branch.WIN,))
    open_model = TinyLM.from_config(config)
    stopped = TinyLM.from_config(replace(config, stop_gradient_gates=True))
    stopped.load_state_dict(open_model.state_dict())
    inputs = torch.randint(256, (1, 32))
    outputs = [model(inputs) for model in (open_model, stopped)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.logsumexp(-1).mean().backward()
    assert not torch.equal(open_model.embed.weight.grad, stopped.embed.weight.grad)


def gradients(model: TinyLM, inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(inputs)
    output.logsumexp(-1).mean().backward()
    return [output.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(
    ("attention", "mode"),
    [
        # Without a checkpoint the next test compiles the same layer.
        pytest.param(Attention.NSA, None, marks=pytest.mark.slow),
        *((Attention.NSA, mode) for mode in Recompute),
        *((attention, None) for attention in (Attention.VANILLA, Attention.STOCK)),
    ],
)
def test_compiled_layers_compute_what_they_compute_uncompiled_and_choose_once_when_they_run_again(
    monkeypatch: pytest.MonkeyPatch, attention: Attention, mode: Recompute | None
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = TinyLM.from_config(replace(CI, layers=3, attention=attention)).double()
    inputs = torch.randint(256, (2, 70))
    if mode is not None:
        checkpoint_layers(model, {0, 1, 2}, mode)
    plain = gradients(model, inputs)
    compile_layers(model, backend="aot_eager")
    made, by_tiles = [], RANKERS["tiles"]
    monkeypatch.setitem(RANKERS, "tiles", lambda *arguments: made.append(1) or by_tiles(*arguments))
    for _ in range(2):
        for ours, theirs in zip(gradients(model, inputs), plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert len(made) == (2 * 3 if attention is Attention.NSA else 0)
    assert not torch._dynamo.utils.counters["graph_break"]
    # One graph serves all layers; a reentrant checkpoint needs one more, for the pass without gradients.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if mode is Recompute.REENTRANT else 1)


@pytest.mark.parametrize("lengths", [(70, 9), pytest.param((64, 70, 41, 9), marks=pytest.mark.slow)], ids=str)
def test_compiled_layers_take_sequences_of_any_length(lengths: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    model = TinyLM.from_config(replace(CI, layers=1)).double()
    batches = [torch.randint(256, (2, length)) for length in lengths]
    plain = [gradients(model, inputs) for inputs in batches]
    compile_layers(model, backend="aot_eager")
    for inputs, expected in zip(batches, plain, strict=True):
        for ours, theirs in zip(gradients(model, inputs), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_a_compiled_layer_is_not_compiled_anew_for_each_length() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    layer = torch.compile(NSAttention(32, 4, 2), backend=counter, fullgraph=True)
    for length in (100, 130, 200, 300, 1100, 1500):
        layer(torch.randn(1, length, 32))
    assert counter.frame_count == 2  # one for the first length, and one with the length as a symbol


def test_a_compiled_run_is_watched_from_outside_of_its_layers(tmp_path: Path) -> None:
    """A hook that is compiled in would stay; a sampled step must leave nothing behind."""
    torch._dynamo.reset()
    model = TinyLM.from_config(replace(CI, layers=2))
    compile_layers(model, backend="aot_eager")
    alone = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend=None)
    telemetry = Telemetry(tmp_path, alone, model, mem_dump_every=0, steps=1, compiled=True)
    telemetry.begin(1)
    gradients(model, torch.randint(256, (1, 64)))
    hooked = [name for name, module in model.named_modules() if module._forward_hooks]
    assert [name for name in hooked if name.startswith("blocks.")] == ["blocks.0", "blocks.1"]
    telemetry.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--gc", "all"), ("--wrapper", "ddp"), ("--wrapper", "fsdp"), ("--wrapper", "fsdp1")]
)
def test_a_compiled_run_has_the_losses_of_an_uncompiled_one(
    program: Program, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """With the compiler that users get, which needs a C++ compiler and its time."""
    common = ("--layers", "2", "--dtype", "float64", "--steps", "3", "--data", "text", *options)
    for name, compiled in (("plain", "--no-compile"), ("compiled", "--compile")):
        done = program(*common, compiled, "--out-dir", name)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_the_stock_layer_never_reads_the_mask_that_it_insists_on() -> None:
    """In training the mask is one NaN; it takes no memory and would poison everything."""
    block = StockBlock(replace(CI, attention=Attention.STOCK))
    x = torch.randn(2, 20, CI.dim)
    mask = block._mask(x)
    assert mask.untyped_storage().nbytes() == 4
    assert bool(mask.isnan().all())
    trained = block(x, x)
    assert bool(trained.isfinite().all())
    torch.testing.assert_close(block.eval()(x, x), trained)
    with torch.no_grad():
        torch.testing.assert_close(block(x, x), trained)
