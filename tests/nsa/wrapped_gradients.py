"""What two ranks compute: for each way to wrap the model, how far its gradients are from those of one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from nsa_attention.branches import BlockSelector
from nsa_attention.config import Attention
from nsa_attention.model import TinyLM
from nsa_attention.parallelize import average_gradients, mean_as_bf16, parallelize, without_reduction
from nsa_attention.settings import Settings, read_settings
from nsa_attention.values import Wrapper
from nsa_attention.world import World, join_ranks

LENGTH, MICRO_BATCHES = 96, 2
REENTRANT = ("--gc", "all", "--gc-mode", "reentrant")
WAYS = {
    "ddp": ("--wrapper", "ddp"),
    "ddp unused": ("--wrapper", "ddp", "--find-unused-parameters"),
    "ddp buckets": ("--wrapper", "ddp", "--bucket-cap-mb", "0.05", "--gradient-as-bucket-view"),
    "ddp buffers": ("--wrapper", "ddp", "--no-broadcast-buffers", "--bucket-cap-mb", "0.05"),
    "ddp gc": ("--wrapper", "ddp", "--gc", "0:1"),
    "ddp static": ("--wrapper", "ddp", "--static-graph", *REENTRANT),
    "manual": ("--wrapper", "manual", *REENTRANT),
    "fsdp": ("--wrapper", "fsdp"),
    "fsdp gc": ("--wrapper", "fsdp", "--gc", "all"),
    "fsdp reentrant": ("--wrapper", "fsdp", *REENTRANT),
    "fsdp1": ("--wrapper", "fsdp1"),
    "fsdp1 gc": ("--wrapper", "fsdp1", "--gc", "all"),
    "fsdp1 reentrant": ("--wrapper", "fsdp1", *REENTRANT),
}
# What further types and layers do to a wrapper, they do to each way of it.
ONE_OF_EACH = ("ddp", "manual", "fsdp", "fsdp1")
REST = tuple(way for way in WAYS if way not in ONE_OF_EACH)


def built(settings: Settings, dtype: torch.dtype) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM.from_config(settings.model, settings.impl).to(dtype)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).logsumexp(-1).mean()


def joint(settings: Settings, dtype: torch.dtype, tokens: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients of one process over all sequences, and the blocks each layer selected for them."""
    model, chosen = built(settings, dtype), []
    for chooser in choosers(model):
        chooser.register_forward_hook(lambda _, __, indices: chosen.append(indices))
    loss(model, tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, chosen


def choosers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, BlockSelector)]


def wrapped(settings: Settings, world: World, dtype: torch.dtype, tokens: Tensor, pinned: list[Tensor] | None) -> dict:
    """Gradients of this rank's share in micro-batches; with `pinned` the selection is that of the joint batch."""
    bare = built(settings, dtype)
    rows = {"now": slice(0, 0)}
    if pinned is not None:
        for chooser, indices in zip(choosers(bare), pinned, strict=True):
            chooser.register_forward_hook(lambda _, __, ___, indices=indices: indices[rows["now"]])
    model = parallelize(bare, settings, world, None)
    for micro in range(MICRO_BATCHES):
        first = world.rank * MICRO_BATCHES + micro
        rows["now"] = slice(first, first + 1)
        last = micro == MICRO_BATCHES - 1
        with nullcontext() if last else without_reduction(model, settings.wrapper):
            (loss(model, tokens[rows["now"]]) / MICRO_BATCHES).backward()
    if settings.wrapper is Wrapper.MANUAL:
        average_gradients(bare, world)
    return dict(whole_gradients(model))


def whole_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    whole = nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        whole = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    with whole:
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
            yield name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""), full


def distances(
    world: World, attention: Attention, dtype: torch.dtype, ways: Iterable[str], *, pin: bool = False
) -> dict[str, float]:
    """Largest difference of any gradient to the joint one, relative to the largest gradient, by way."""
    common = ("--layers", "2", "--attention", attention)
    settings = read_settings(common, {})
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(settings.model.vocab, (world.size * MICRO_BATCHES, LENGTH), generator=generator)
    expected, chosen = joint(settings, dtype, tokens)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    found = {}
    for name in ways:
        settings = replace(read_settings((*common, *WAYS[name]), {}), dtype=str(dtype).removeprefix("torch."))
        found_here = wrapped(settings, world, dtype, tokens, chosen if pin else None)
        assert found_here.keys() == expected.keys()
        found[name] = max(float((found_here[key] - expected[key]).abs().max()) for key in expected) / largest
    return found


def bf16_mean_is_exact(world: World) -> bool:
    """Each rank can compute what the exchange must give, as it knows what the others sent."""
    sent = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
    expected = torch.stack([values.bfloat16().float() for values in sent]).mean(0).bfloat16().float()
    return torch.equal(mean_as_bf16(sent[world.rank]), expected)


def bf16_hook_distance(world: World) -> float:
    """Largest difference, relative to the largest gradient of its parameter, that travelling as bfloat16 makes."""
    options = ("--layers", "1", "--wrapper", "ddp", "--bucket-cap-mb", "0.05")
    tokens = torch.randint(256, (world.size * MICRO_BATCHES, LENGTH), generator=torch.Generator().manual_seed(7))
    plain, rounded = (
        wrapped(read_settings((*options, "--comm-hook", hook), {}), world, torch.float32, tokens, None)
        for hook in ("none", "bf16")
    )
    return max(float((rounded[name] - plain[name]).abs().max() / plain[name].abs().max()) for name in plain)


def measured(world: World, ways: Sequence[str]) -> dict[str, Any]:
    return {
        "float32": distances(world, Attention.NSA, torch.float32, ways, pin=True),
        "stock": distances(world, Attention.STOCK, torch.float64, ways),
    }


def compare(what: str) -> dict[str, Any]:
    """Return the distances and whether the mean in bfloat16 is exact. `what`: "first", or "rest" for slow tests."""
    torch.set_num_threads(1)
    with join_ranks("cpu", "gloo", needs_group=True) as world:
        if what == "rest":
            return measured(world, REST)
        return measured(world, ONE_OF_EACH) | {
            "float64": distances(world, Attention.NSA, torch.float64, WAYS),
            "bf16_mean_is_exact": bf16_mean_is_exact(world),
            "bf16_hook": bf16_hook_distance(world),
        }
