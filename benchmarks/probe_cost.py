"""Measure the time and memory that the nsa-harness probe costs in a training process.

    python benchmarks/probe_cost.py                      the full measurement, into benchmarks/results/
    python benchmarks/probe_cost.py --pairs 2 --out F    a quick measurement

One process trains the `ci` shape of nsa. A pair is a block of steps with the hooks and a block without, in reversed
order in every other pair, so that changes of the machine's speed affect both equally. The heartbeat is timed on its
own. Memory is the difference between a rank with the full probe and a rank without: private pages after a step, and the
status file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.provenance import measurement_context  # noqa: E402
from benchmarks.timing_pairs import HookTables, alternate, percent_more  # noqa: E402
from nsa_attention.config import SHAPES  # noqa: E402
from nsa_attention.model import TinyLM  # noqa: E402
from nsa_harness import protocol  # noqa: E402
from nsa_harness.probe import collectives, groups, heartbeat, hooks, waits  # noqa: E402
from nsa_harness.probe.exceptions import DroppedBatchCounter  # noqa: E402
from nsa_harness.probe.patches import TroubleLog  # noqa: E402
from nsa_harness.probe.places import foreign_code  # noqa: E402
from nsa_harness.probe.status_file import StatusFileWriter  # noqa: E402

MARKS = 100_000
CALLS = 5_000
CALL_DEPTH = 8  # Python frames above the call
MEMORY_PAIRS = 2
ONE_STEP = """
import os, tempfile, time, torch, torch.distributed as dist
home = tempfile.mkdtemp()
dist.init_process_group("gloo", init_method=f"file://{home}/store", rank=0, world_size=1)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(50)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.ones(8)).sum().backward()
    dist.all_reduce(torch.ones(2))
    optimizer.step()
time.sleep(1)
print(open("/proc/self/smaps_rollup").read())
"""


class Training:
    """Single-threaded training of a small model."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = SHAPES["ci"]
        self._model = TinyLM.from_config(config)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._tokens = torch.randint(config.vocab, (2, config.seq_len))

    def seconds(self, steps: int) -> tuple[float, float]:
        """Run several training steps, and return their total wall and CPU times in seconds."""
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(steps):
            logits = self._model(self._tokens)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens.flatten()).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return time.perf_counter() - wall, time.process_time() - processor


def measure(*, pairs: int, steps: int, repeats: int) -> dict[str, Any]:
    """Measure the time and memory that the probe costs, and return all measurements with a summary."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        board = StatusFileWriter(os.path.join(directory, "bench.board"), rank=0, world_size=1)
        trouble = TroubleLog(directory)
        # The heartbeat reads the flight recorder, which is empty without a process group.
        torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        torch.distributed.all_reduce(torch.ones(1))
        marks = [_mark_ns(board) for _ in range(repeats)]
        calls = [_call_ns(*_both_calls(board, trouble)) for _ in range(repeats)]
        beats = [_beat_ns(heartbeat.Heartbeat(board, directory, trouble)) for _ in range(repeats)]
        samples = _pairs(Training(), _installed_hooks(board, trouble), pairs + 1, steps)[1:]
        memory = [_memory(directory) for _ in range(MEMORY_PAIRS)]
        torch.distributed.destroy_process_group()
        if trouble_files := list(Path(directory).glob("*.trouble.jsonl")):
            raise SystemExit(f"the probe gave up during the measurement: {trouble_files[0].read_text()}")
    return {
        "samples": {"mark_ns": marks, "call_ns": calls, "beat_ns": beats, "pairs": samples, "memory": memory},
        "summary": _summary(marks, calls, beats, samples) | _memory_summary(memory),
    }


def _memory(directory: str) -> dict[str, int]:
    """Return the private memory, in bytes, of a training process with and without the probe."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")
    }
    without_probe = environment | {"RANK": "0", "WORLD_SIZE": "1"}
    boards = tempfile.mkdtemp(dir=directory)
    with_probe = without_probe | {
        "PYTHONPATH": str(REPOSITORY / "harness" / "nsa_harness" / "probe" / "bootstrap"),
        protocol.ENV_PROBE_DIRECTORY: boards,
    }
    return {name: _private_bytes(env) for name, env in (("with_bytes", with_probe), ("without_bytes", without_probe))}


def _private_bytes(env: dict[str, str]) -> int:
    result = subprocess.run([sys.executable, "-c", ONE_STEP], env=env, capture_output=True, text=True, check=True)
    return 1024 * sum(int(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("Private_"))


def _memory_summary(memory: list[dict[str, int]]) -> dict[str, float]:
    added_bytes = statistics.median(pair["with_bytes"] - pair["without_bytes"] for pair in memory)
    return {"memory_mb_median": (added_bytes + protocol.STATUS_FILE_SIZE) / 1e6}


def _mark_ns(board: StatusFileWriter) -> float:
    label, event = board.event_code("forward", "blocks.0.attn"), board.write_training_event
    start = time.perf_counter_ns()
    for _ in range(MARKS):
        event(label)
    return (time.perf_counter_ns() - start) / MARKS


def all_reduce(tensor: torch.Tensor, op: object = None, group: object = None, async_op: bool = False) -> None:
    """Do nothing, so that only the cost of the hook around this function is measured."""


def _both_calls(board: StatusFileWriter, trouble: TroubleLog) -> tuple[Any, Any]:
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    lasting, members = waits.Waits(board, foreign_code(torch), trouble), groups.Groups(c10d, board)
    namespace = types.SimpleNamespace(all_reduce=all_reduce)
    collectives.CallRecorder(torch, c10d, board, trouble, lasting, members).patch(namespace, "all_reduce")
    return namespace.all_reduce, all_reduce


def _call_ns(with_hook: Any, without_hook: Any, depth: int = CALL_DEPTH) -> float:
    """Return the CPU time, in nanoseconds, that the hook adds to one call.

    The call is made below `depth` additional stack frames.
    """
    if depth:
        return _call_ns(with_hook, without_hook, depth - 1)
    value = torch.ones(4)
    elapsed_ns = []
    for call in (without_hook, with_hook):
        call(value)  # warm-up: the probe caches information about the call site
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call(value)
        elapsed_ns.append(time.thread_time_ns() - start)
    return (elapsed_ns[1] - elapsed_ns[0]) / CALLS


def _beat_ns(beat: heartbeat.Heartbeat) -> float:
    start = time.perf_counter_ns()
    for _ in range(100):
        beat._beat()
    return (time.perf_counter_ns() - start) / 100


def _installed_hooks(board: StatusFileWriter, trouble: TroubleLog) -> HookTables:
    foreign = foreign_code(torch)
    hooks.install(torch, board, trouble, DroppedBatchCounter(board, foreign), hooks.FetchTimes(foreign))
    return HookTables()


def _pairs(training: Training, switch: HookTables, pairs: int, steps: int) -> list[dict[str, Any]]:
    samples = []
    for number in range(pairs):
        pair: dict[str, Any] = {"first": "with" if number % 2 else "without"}
        for on in alternate(number, (True, False)):
            switch.turn(on=on)
            wall, processor = training.seconds(steps)
            name = "with" if on else "without"
            pair |= {f"{name}_wall_s": wall / steps, f"{name}_cpu_s": processor / steps}
        samples.append(pair)
    switch.turn(on=False)
    return samples


def _summary(
    marks: list[float], calls: list[float], beats: list[float], samples: list[dict[str, Any]]
) -> dict[str, float]:
    wall = [pair["with_wall_s"] / pair["without_wall_s"] - 1 for pair in samples]
    processor = [pair["with_cpu_s"] / pair["without_cpu_s"] - 1 for pair in samples]
    with_s, without_s = ([pair[f"{side}_wall_s"] for pair in samples] for side in ("with", "without"))
    return {
        "mark_ns_median": statistics.median(marks),
        "call_ns_median": statistics.median(calls),
        "call_ns_least": min(calls),
        "beat_share_percent": 100 * statistics.median(beats) / (heartbeat.INTERVAL_S * 1e9),
        "step_ms_without_median": 1000 * statistics.median(pair["without_wall_s"] for pair in samples),
        "hooks_wall_percent_median": 100 * statistics.median(wall),
        "hooks_cpu_percent_median": 100 * statistics.median(processor),
        "hooks_wall_percent_mean": percent_more(statistics.fmean, with_s, without_s),
        "hooks_wall_percent_p99": percent_more(_p99, with_s, without_s),
    }


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure what the probe costs.")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1, help="steps of one block")
    parser.add_argument("--repeats", type=int, default=20, help="repetitions of the event and heartbeat timings")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "probe_cost.json")
    options = parser.parse_args(arguments)
    result = {
        **measurement_context(__file__, arguments),
        **measure(pairs=options.pairs, steps=options.steps, repeats=options.repeats),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
