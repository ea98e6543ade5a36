"""What a run pays for being watched, everything on: step time, its tail, memory and loss, under real torchrun.

    python benchmarks/run_cost.py                      the full measurement, into benchmarks/results/
    python benchmarks/run_cost.py --pairs 5 --out F    a quick look

One rank, then two, train the `ci` shape of nsa under DDP and under the harness. A pair is a step with the probe's hooks
in and the controller running, and one with the hooks out and the controller stopped (SIGSTOP), its order turned round
from pair to pair: what else the machine does hits both alike. Memory and loss are compared with the same program under
torchrun alone.
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

RANKS = (1, 2)  # one with a core to spare for everything else, and as many as there are cores on a small machine
BLOCK = 1  # steps: the machine changes its mind within a second
WARM_UP = 3  # steps, and one pair
ABOVE_THE_RANK = 3  # torchrun, the guardian, the controller
LIMITS = {"step_mean_percent": 2.0, "step_p99_percent": 2.0, "memory_mb": 30.0}
LIMIT_S = 3600
_SIDES = ("bare_s", "watched_s")  # each step: wall and processor seconds


def measure(pairs: int, repeats: int) -> dict[str, Any]:
    """Every raw sample and what follows from it."""
    with tempfile.TemporaryDirectory() as directory:
        runs = (("bare", _bare(max(RANKS))), ("watched", _watched(max(RANKS), 0)))
        alike = [{name: _ranks(command, Path(directory), max(RANKS)) for name, command in runs} for _ in range(repeats)]
        steps = {ranks: _ranks(_watched(ranks, pairs), Path(directory), ranks) for ranks in RANKS}
    summary = {
        **_alike(alike),
        **{f"{key}_of_{ranks}": value for ranks, said in steps.items() for key, value in _slower(said).items()},
    }
    return {"samples": {"alike": alike, "steps": steps}, "summary": summary}


def _bare(ranks: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, __file__, "--inside", "--pairs=0"]


def _watched(ranks: int, pairs: int) -> list[str]:
    harness = [str(Path(sys.executable).parent / "nsa-harness"), "run", "--script", __file__, f"--ranks={ranks}"]
    return [*harness, "limits.deadline_s=3600", "--", "--inside", f"--pairs={pairs}"]


def _ranks(command: Sequence[str], directory: Path, count: int) -> list[dict[str, Any]]:
    """What the ranks of one run said of themselves."""
    said = directory / "said"
    said.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUN_COST_SAID": str(said)}
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True, timeout=LIMIT_S)
    ranks = [json.loads((said / f"{rank}.json").read_text()) for rank in range(count)]
    for path in said.iterdir():
        path.unlink()
    return ranks


def _alike(alike: list[dict[str, Any]]) -> dict[str, Any]:
    memory = [
        (watched["peak_rss_bytes"] - bare["peak_rss_bytes"]) / 1e6
        for run in alike
        for bare, watched in zip(run["bare"], run["watched"], strict=True)
    ]
    losses = {rank["losses"][-1] for run in alike for side in run.values() for rank in side[:1]}
    return {
        "memory_mb_median": statistics.median(memory),
        "memory_mb_max": max(memory),
        "loss_is_the_same_bit_for_bit": len(losses) == 1,
    }


def _slower(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Wall seconds of steps, and processor seconds of the thread that trains, which other processes disturb less."""
    bare, watched = ([one for rank in steps for pair in rank["pairs"] for one in pair[side]] for side in _SIDES)
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
    """One rank: trains, and with `pairs` measures itself watched and unwatched in turn."""
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
            begun, begun_cpu = time.perf_counter(), time.thread_time()
            step()
            times.append((time.perf_counter() - begun, time.thread_time() - begun_cpu))
        return times

    losses = [step() for _ in range(WARM_UP)]
    switch = _Switch(dist) if pairs else None
    measured = [_pair(number, block, switch) for number in range(pairs + 1)][1:] if switch else []
    said = {"losses": losses, "peak_rss_bytes": peak_rss_bytes(), "pairs": measured}
    Path(os.environ["RUN_COST_SAID"], f"{dist.get_rank()}.json").write_text(json.dumps(said))
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
    """The hooks of the probe in this process, and the controller: in or out."""

    def __init__(self, dist: Any) -> None:
        self._dist = dist
        self._hooks = HookTables()
        if not self._hooks.are_complete:
            raise SystemExit("the probe is not in this process: run me under nsa-harness")
        self._controller = _ancestor(ABOVE_THE_RANK)

    def turn(self, *, on: bool) -> None:
        """Turn the hooks of every rank, and on the first rank the controller; then all continue together."""
        self._hooks.turn(on=on)
        if self._dist.get_rank() == 0:
            os.kill(self._controller, signal.SIGCONT if on else signal.SIGSTOP)
        self._dist.barrier()


def _ancestor(above: int) -> int:
    import psutil

    found = psutil.Process().parents()[above - 1]
    if "nsa-harness" not in " ".join(found.cmdline()):
        raise SystemExit(f"process {found.pid} is not the controller: {found.cmdline()}")
    return found.pid


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure what a run pays for being watched.")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3, help="runs that compare memory and loss with torchrun alone")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "run_cost.json")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        inside(options.pairs)
        return 0
    from benchmarks.provenance import circumstances

    measured = measure(options.pairs, options.repeats)
    result = {**circumstances(__file__, arguments), "limits": LIMITS, **measured}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
