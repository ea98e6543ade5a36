"""Writing checkpoints: every rank its part by torch.distributed.checkpoint, at once or in the background."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..observe import say
from ..settings import Settings
from ..world import CannotRunError, World
from .carried import carried_text, rank_file
from .folder import FOLDER, Manifest, Seal, begin, beside, finish, keep_newest, sealed, tidy, write_durably
from .shape import dimensions

T = TypeVar("T")
# torch.distributed.checkpoint says so of every process that has no group, also where it was told that it is alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized, assuming")
# What the numbers of a run depend on besides its shape: a run that goes on says what it does otherwise.
_DECISIVE = ("wrapper", "dtype", "batch", "accumulate", "data", "seed", "learning_rate", "clip", "freeze")


def decisive(settings: Settings) -> dict[str, str]:
    """As text, by the names of their options."""
    return {name: str(getattr(settings, name)) for name in _DECISIVE} | {"seq_len": str(settings.model.seq_len)}


@dataclass(frozen=True, kw_only=True)
class _Content:
    """A checkpoint in memory, as this rank has it."""

    step: int
    tensors: dict[str, Any]
    carried: str
    scaler: Mapping[str, Any]


@contextmanager
def saving(settings: Settings, world: World, done: int) -> Iterator[Saver]:
    """A Saver that is closed behind the block. An error of the block goes before one of the last checkpoint."""
    saver = Saver(settings, world, done)
    try:
        yield saver
    except BaseException:
        with suppress(Exception):
            saver.close()
        raise
    saver.close()


class Saver:
    """The checkpoints of one run. Every rank must call `save` and `close` alike: they are collective.

    What cannot be written raises CannotRunError on every rank: from `save`, or, where it was written in the background,
    from the next `save` or from `close`.
    """

    def __init__(self, settings: Settings, world: World, done: int) -> None:
        """`done`: steps of the run so far."""
        self._settings, self._world = settings, world
        self._folder = settings.out_dir / FOLDER
        self._thread = ThreadPoolExecutor(1, "checkpoint") if settings.async_checkpoint else None
        self._in_flight: Future[None] | None = None
        # Of its own: what a thread exchanges must not come between the collectives of a step, and NCCL moves no text.
        self._group = None if world.backend is None else dist.new_group(backend="gloo")
        self._together(lambda: self._tidy(done))

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, data: object
    ) -> None:
        """Returns when the checkpoint is whole; one in the background, when model and optimizer may change again."""
        # Nearly a second of imports, which a run without checkpoints need not pay; below too.
        from torch.distributed.checkpoint.state_dict import get_state_dict

        started_s = time.perf_counter()
        self._wait()
        weights, moments = get_state_dict(model, optimizer)
        content = _Content(
            step=step,
            tensors={"model": weights, "optimizer": moments},
            carried=carried_text(self._world, data),
            scaler=scaler.state_dict(),
        )
        if self._thread is None:
            self._write(content, started_s, "")
            return
        content = replace(content, tensors=_copied(content.tensors))
        held_s = time.perf_counter() - started_s
        self._in_flight = self._thread.submit(
            self._write, content, started_s, f" in the background, training waited {held_s:.2f} s of it"
        )

    def close(self) -> None:
        """Wait for what is being written."""
        try:
            self._wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _wait(self) -> None:
        flying, self._in_flight = self._in_flight, None
        if flying is not None:
            flying.result()

    def _tidy(self, done: int) -> None:
        if self._world.is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            for told in tidy(self._folder, done):
                say(f"nsa.train {told}")

    def _write(self, content: _Content, started_s: float, how: str) -> None:
        aside = beside(self._folder, content.step)
        try:
            self._together(lambda: begin(aside) if self._world.is_first else None)
            self._write_tensors(aside, content.tensors)
            sealed_by_rank = self._together(lambda: self._seal(aside, content.carried))
            files = {name: seal for seals in sealed_by_rank for name, seal in seals.items()}
            self._together(lambda: self._complete(aside, content, files))
        except CannotRunError as error:
            raise CannotRunError(f"--checkpoint-every: the checkpoint of step {content.step}: {error}") from error
        if self._world.is_first:
            size_mb = sum(seal.size_bytes for seal in files.values()) / 1e6
            took_s = time.perf_counter() - started_s
            say(f"checkpoint step {content.step} {size_mb:.1f} MB {took_s:.2f} s{how}")

    def _write_tensors(self, aside: Path, tensors: dict[str, Any]) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.api import CheckpointException

        writer = checkpoint.FileSystemWriter(aside)
        try:
            checkpoint.save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        except CheckpointException as error:
            raise CannotRunError(first_failure(error)) from error

    def _seal(self, aside: Path, carried: str) -> dict[str, Seal]:
        """Write what this rank carries; the files of this rank."""
        rank = self._world.rank
        write_durably(aside / rank_file(rank), carried)
        mine = [aside / rank_file(rank), *aside.glob(f"__{rank}_*"), *(aside.glob(".*") if rank == 0 else ())]
        return {path.name: sealed(path) for path in mine}

    def _complete(self, aside: Path, content: _Content, files: Mapping[str, Seal]) -> None:
        if not self._world.is_first:
            return
        manifest = Manifest(
            step=content.step,
            world_size=self._world.size,
            dimensions=dimensions(self._settings.model),
            settings=decisive(self._settings),
            scaler=content.scaler,
            files=files,
        )
        finish(aside, manifest)
        if self._settings.keep_last:
            keep_newest(self._folder, self._settings.keep_last)

    def _together(self, action: Callable[[], T]) -> list[T]:
        """What the action returned on each rank. What one of them cannot do, all raise."""
        mine, failure = None, None
        try:
            mine = action()
        except OSError as error:
            failure = f"rank {self._world.rank}: {error}"
        everywhere: list[Any] = [(mine, failure)]
        if self._group is not None:
            everywhere *= self._world.size
            dist.all_gather_object(everywhere, (mine, failure), group=self._group)
        if failures := [failure for _, failure in everywhere if failure]:
            raise CannotRunError("; ".join(failures))
        return [result for result, _ in everywhere]


def first_failure(error: BaseException) -> str:
    """What torch.distributed.checkpoint met, of the lowest rank, without its traceback."""
    failures = getattr(error, "failures", {})
    return "; ".join(f"rank {rank}: {what}" for rank, (what, _) in sorted(failures.items())[:1]) or str(error)


def _copied(tensors: dict[str, Any]) -> dict[str, Any]:
    """In the memory of the host, whatever the training does with the tensors from now on."""
    # DefaultStager, which torch prefers, cannot copy the sharded tensors of FSDP1 (torch 2.13).
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    copies: dict[str, Any] = BlockingAsyncStager().stage(tensors)
    return copies
