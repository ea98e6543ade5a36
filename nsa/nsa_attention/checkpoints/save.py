"""Saving of checkpoints, in the training thread or in the background."""

from __future__ import annotations

import shutil
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
from .folder import (
    COMPLETE,
    FOLDER,
    FileDigest,
    Manifest,
    create_empty,
    digest_of,
    finish,
    keep_newest,
    lack_of_space_named,
    tidy,
    write_durably,
    writing_path,
)
from .rank_state import rank_file, rank_state_text
from .shape import dimensions

T = TypeVar("T")
# torch.distributed.checkpoint warns in every process without a process group, even if called with no_dist=True.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized, assuming")
# Options that influence the training, apart from the model's dimensions. A resumed run prints which of them changed.
_INFLUENTIAL = ("wrapper", "dtype", "batch", "accumulate", "data", "seed", "learning_rate", "clip", "freeze")


def influential_settings(settings: Settings) -> dict[str, str]:
    """Return the options that influence the training, with their values as strings."""
    return {name: str(getattr(settings, name)) for name in _INFLUENTIAL} | {"seq_len": str(settings.model.seq_len)}


@dataclass(frozen=True, kw_only=True)
class _Content:
    """The data that this rank writes to a checkpoint."""

    step: int
    tensors: dict[str, Any]
    rank_state: str
    scaler: Mapping[str, Any]


@contextmanager
def open_saver(settings: Settings, world: World, done: int) -> Iterator[Saver]:
    """Yield a checkpoint writer, and close it at the end of the `with` block.

    `done` is the number of steps finished so far. If the block raises, its exception is propagated, and an error while
    the last checkpoint is written is ignored.
    """
    saver = Saver(settings, world, done)
    try:
        yield saver
    except BaseException:
        with suppress(Exception):
            saver.close()
        raise
    saver.close()


class Saver:
    """A writer for one run's checkpoints. Every rank must call `save` and `close`.

    If a checkpoint cannot be written, every rank raises CannotRunError. `save` raises it, or, if the checkpoint is
    written in the background, the next `check`, `save` or `close`.
    """

    def __init__(self, settings: Settings, world: World, done: int) -> None:
        """Create and clean up the checkpoint directory. `done` is the number of steps finished so far."""
        self._settings, self._world = settings, world
        self._folder = settings.out_dir / FOLDER
        self._thread = ThreadPoolExecutor(1, "checkpoint") if settings.async_checkpoint else None
        self._in_flight: Future[None] | None = None
        # A separate group, because the background thread must not mix its collectives with those of the training
        # step, and because NCCL cannot send text.
        self._group = None if world.backend is None else dist.new_group(backend="gloo")
        # The training step must not use the group of the background thread.
        self._step_group = None if self._thread is None or not self._group else dist.new_group(backend="gloo")
        self._on_all_ranks(lambda: self._tidy(done))

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, data: object
    ) -> None:
        """Write the checkpoint of `step`.

        Return when the checkpoint is complete. With `--async-checkpoint`, return as soon as the tensors are copied, so
        that the next training step may start.
        """
        # Imported late, because runs without checkpoints do not need it and it takes nearly a second to load.
        from torch.distributed.checkpoint.state_dict import get_state_dict

        started_s = time.perf_counter()
        self._wait()
        weights, moments = get_state_dict(model, optimizer)
        content = _Content(
            step=step,
            tensors={"model": weights, "optimizer": moments},
            rank_state=rank_state_text(self._world, data),
            scaler=scaler.state_dict(),
        )
        if self._thread is None:
            self._write(content, started_s, "")
            return
        content = replace(content, tensors=_copy_to_cpu(content.tensors))
        waited_s = time.perf_counter() - started_s
        self._in_flight = self._thread.submit(
            self._write, content, started_s, f" in the background; training waited {waited_s:.2f} s"
        )

    def check(self) -> None:
        """Raise CannotRunError if writing a checkpoint in the background has failed.

        Every rank must call this method after each step. Nothing happens until all ranks have finished writing, so that
        every rank raises the error after the same step.
        """
        if self._in_flight is None:
            return
        is_done = torch.tensor(int(self._in_flight.done()))
        if self._step_group is not None:
            dist.all_reduce(is_done, dist.ReduceOp.MIN, self._step_group)
        if is_done:
            self._wait()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and stop the background thread."""
        try:
            self._wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _wait(self) -> None:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def _tidy(self, done: int) -> None:
        if self._world.is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            for line in tidy(self._folder, done):
                say(f"nsa.train {line}")

    def _write(self, content: _Content, started_s: float, how: str) -> None:
        aside = writing_path(self._folder, content.step)
        try:
            self._on_all_ranks(lambda: create_empty(aside) if self._world.is_first else None)
            self._write_tensors(aside, content.tensors)
            digests_by_rank = self._on_all_ranks(lambda: self._write_rank_state(aside, content.rank_state))
            files = {name: digest for digests in digests_by_rank for name, digest in digests.items()}
            self._on_all_ranks(lambda: self._complete(aside, content, files))
        except CannotRunError as error:
            if self._world.is_first and not (aside / COMPLETE).exists():
                shutil.rmtree(aside, ignore_errors=True)
            raise CannotRunError(f"--checkpoint-every: the checkpoint of step {content.step}: {error}") from error
        if self._world.is_first:
            size_mb = sum(digest.size_bytes for digest in files.values()) / 1e6
            took_s = time.perf_counter() - started_s
            say(f"checkpoint step {content.step} {size_mb:.1f} MB {took_s:.2f} s{how}")

    def _write_tensors(self, aside: Path, tensors: dict[str, Any]) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.api import CheckpointException

        class Writer(checkpoint.FileSystemWriter):
            def write_data(self, plan: Any, planner: Any) -> Any:
                # An exception loses its context on the way to other ranks, so the lack of space is named here.
                with lack_of_space_named(aside, sum(item.tensor_storage_size() or 0 for item in plan.items)):
                    return super().write_data(plan, planner)

            def finish(self, metadata: Any, results: Any) -> None:
                with lack_of_space_named(aside / ".metadata"):
                    super().finish(metadata, results)

        try:
            checkpoint.save(
                tensors, storage_writer=Writer(aside), process_group=self._group, no_dist=self._group is None
            )
        except CheckpointException as error:
            raise CannotRunError(first_failure(error)) from error

    def _write_rank_state(self, aside: Path, rank_state: str) -> dict[str, FileDigest]:
        """Write this rank's state file, and return the digests of all files this rank has written."""
        rank = self._world.rank
        write_durably(aside / rank_file(rank), rank_state)
        mine = [aside / rank_file(rank), *aside.glob(f"__{rank}_*"), *(aside.glob(".*") if rank == 0 else ())]
        return {path.name: digest_of(path) for path in mine}

    def _complete(self, aside: Path, content: _Content, files: Mapping[str, FileDigest]) -> None:
        if not self._world.is_first:
            return
        manifest = Manifest(
            step=content.step,
            world_size=self._world.size,
            dimensions=dimensions(self._settings.model),
            settings=influential_settings(self._settings),
            scaler=content.scaler,
            files=files,
        )
        finish(aside, manifest)
        if self._settings.keep_last:
            keep_newest(self._folder, self._settings.keep_last)

    def _on_all_ranks(self, action: Callable[[], T]) -> list[T]:
        """Call `action`, and return the results of all ranks. Every rank must call this method."""
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
    """Return the message of `error`, without a traceback. If several ranks failed, only the first is named."""
    failures = getattr(error, "failures", {})
    return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in sorted(failures.items())[:1]) or str(error)


def _copy_to_cpu(tensors: dict[str, Any]) -> dict[str, Any]:
    # PyTorch recommends DefaultStager, but it cannot copy the sharded tensors of FSDP1 (torch 2.13).
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    copies: dict[str, Any] = BlockingAsyncStager().stage(tensors)
    return copies
