"""Measure the cost of training under nsa-harness with all features enabled.

    python benchmarks/run_cost.py                      the full measurement, into benchmarks/results/
    python benchmarks/run_cost.py --pairs 5 --out F    a quick measurement

One rank, then two, train the `ci` shape of nsa with DDP under nsa-harness. A pair is a step with the probe's hooks
installed and the controller running, and a step with the hooks removed and the controller stopped (SIGSTOP), in
reversed order in every other pair, so that other load affects both equally. Memory and loss are compared with the same
program under torchrun without nsa-harness.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.timing_pairs import HookTables, alternate, percent_more  # noqa: E402

RANKS = (1, 2)  # with a spare core for other processes, and with as many ranks as a small machine has cores
BLOCK = 1  # steps per side of a pair; the speed of a shared machine changes within a second
WARM_UP = 3  # steps before the first pair; the first pair is dropped as well
ABOVE_THE_RANK = 3  # process levels above a rank: torchrun, the reaper, the controller
LIMITS = {"step_mean_percent": 2.0, "step_p99_percent": 2.0, "memory_mb": 30.0}
LIMIT_S = 3600
_SIDES = ("bare_s", "watched_s")  # per step: wall and CPU seconds


def measure(pairs: int, repeats: int) -> dict[str, Any]:
    """Measure training with and without nsa-harness, and return all measurements with a summary."""
    with tempfile.TemporaryDirectory() as directory:
        runs = (("bare", _bare_command(max(RANKS))), ("watched", _watched_command(max(RANKS), 0)))
        paired_runs = [
            {name: _ranks(command, Path(directory), max(RANKS)) for name, command in runs} for _ in range(repeats)
        ]
        steps = {ranks: _ranks(_watched_command(ranks, pairs), Path(directory), ranks) for ranks in RANKS}
    summary = {
        **_compare_runs(paired_runs),
        **{
            f"{key}_of_{ranks}": value
            for ranks, rank_results in steps.items()
            for key, value in _slowdown(rank_results).items()
        },
    }
    return {"samples": {"alike": paired_runs, "steps": steps}, "summary": summary}


def _bare_command(ranks: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, __file__, "--inside", "--pairs=0"]


def _watched_command(ranks: int, pairs: int) -> list[str]:
    harness = [str(Path(sys.executable).parent / "nsa-harness"), "run", "--script", __file__, f"--ranks={ranks}"]
    return [*harness, "limits.deadline_s=3600", "--", "--inside", f"--pairs={pairs}"]


def _ranks(command: Sequence[str], directory: Path, count: int) -> list[dict[str, Any]]:
    """Run a command, and return the results written by its ranks."""
    result_directory = directory / "said"
    result_directory.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUN_COST_SAID": str(result_directory)}
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True, timeout=LIMIT_S)
    ranks = [json.loads((result_directory / f"{rank}.json").read_text()) for rank in range(count)]
    for path in result_directory.iterdir():
        path.unlink()
    return ranks


def _compare_runs(paired_runs: list[dict[str, Any]]) -> dict[str, Any]:
    memory = [
        (watched["peak_rss_bytes"] - bare["peak_rss_bytes"]) / 1e6
        for run in paired_runs
        for bare, watched in zip(run["bare"], run["watched"], strict=True)
    ]
    losses = {rank["losses"][-1] for run in paired_runs for side in run.values() for rank in side[:1]}
    return {
        "memory_mb_median": statistics.median(memory),
        "memory_mb_max": max(memory),
        "loss_is_the_same_bit_for_bit": len(losses) == 1,
    }


def _slowdown(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the slowdown of training steps under nsa-harness, in percent.

    CPU time depends less on other processes.
    """
    bare, watched = ([sample for rank in steps for pair in rank["pairs"] for sample in pair[side]] for side in _SIDES)
    pairs = [pair for rank in steps for pair in rank["pairs"]]
    ratios = [sum(wall for wall, _ in pair[_SIDES[1]]) / sum(wall for wall, _ in pair[_SIDES[0]]) - 1 for pair in pairs]
    return {
        "steps": len(bare),
        "step_ms_bare_mean": 1000 * statistics.mean(wall for wall, _ in bare),
        "step_mean_percent": percent_more(statistics.mean, [wall for wall, _ in watched], [wall for wall, _ in bare]),
        "step_median_percent": percent_more(
            statistics.median, [wall for wall, _ in watched], [wall for wall, _ in bare]
        ),
        "step_percent_median_of_pairs": 100 * statistics.median(ratios),
        "step_p99_percent": percent_more(_p99, [wall for wall, _ in watched], [wall for wall, _ in bare]),
        "thread_cpu_mean_percent": percent_more(statistics.mean, [cpu for _, cpu in watched], [cpu for _, cpu in bare]),
    }


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def inside(pairs: int) -> None:
    """Train in one rank, and measure `pairs` pairs of rounds, one with and one without nsa-harness."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from nsa_attention.config import SHAPES
    from nsa_attention.model import TinyLM
    from nsa_attention.telemetry import peak_rss_bytes

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = SHAPES["ci"]
    model = DistributedDataParallel(TinyLM.from_config(config))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(config.vocab, (2, config.seq_len))

    def step() -> str:
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()).hex()

    def block() -> list[tuple[float, float]]:
        times = []
        for _ in range(BLOCK):
            started, started_cpu = time.perf_counter(), time.thread_time()
            step()
            times.append((time.perf_counter() - started, time.thread_time() - started_cpu))
        return times

    losses = [step() for _ in range(WARM_UP)]
    switch = _Switch(dist) if pairs else None
    measured_pairs = [_pair(number, block, switch) for number in range(pairs + 1)][1:] if switch else []
    results = {"losses": losses, "peak_rss_bytes": peak_rss_bytes(), "pairs": measured_pairs}
    Path(os.environ["RUN_COST_SAID"], f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _pair(number: int, block: Any, switch: _Switch) -> dict[str, Any]:
    order = alternate(number, (True, False))
    pair: dict[str, Any] = {"first": "watched" if order[0] else "bare"}
    for on in order:
        switch.turn(on=on)
        pair[_SIDES[on]] = block()
    switch.turn(on=True)
    return pair


class _Switch:
    """A switch that turns nsa-harness on and off for this rank."""

    def __init__(self, dist: Any) -> None:
        self._dist = dist
        self._hooks = HookTables()
        if not self._hooks.are_complete:
            raise SystemExit("this process has no probe: run this script with nsa-harness")
        self._controller = _ancestor(ABOVE_THE_RANK)

    def turn(self, *, on: bool) -> None:
        """Turn nsa-harness on or off, then wait for all ranks.

        The hooks are installed or removed in every rank. Rank 0 also continues or stops the controller process.
        """
        self._hooks.turn(on=on)
        if self._dist.get_rank() == 0:
            os.kill(self._controller, signal.SIGCONT if on else signal.SIGSTOP)
        self._dist.barrier()


def _ancestor(levels: int) -> int:
    import psutil

    process = psutil.Process().parents()[levels - 1]
    if "nsa-harness" not in " ".join(process.cmdline()):
        raise SystemExit(f"process {process.pid} is not the controller: {process.cmdline()}")
    return process.pid


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure the cost of running under nsa-harness.")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3, help="runs that compare memory and loss with plain torchrun")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "run_cost.json")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        inside(options.pairs)
        return 0
    from benchmarks.provenance import measurement_context

    measurements = measure(options.pairs, options.repeats)
    result = {**measurement_context(__file__, arguments), "limits": LIMITS, **measurements}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
