"""Measure the time that recording statement coverage costs a rank, per training step and at its start.

    python benchmarks/coverage_cost.py --python PATH             into benchmarks/results/
    python benchmarks/coverage_cost.py --python PATH --quick --out F

`PATH` is a Python 3.12 or later with torch. Coverage costs nothing on older versions, because they record nothing.

Steps: each process runs one of the programs below with the probe. Coverage is switched every ten steps, in the order
on, off, off, on, in the same process, because two processes of the same program can differ by several percent. The
first steps after a switch are dropped: `on` reports every line once more, which happens only once in a real run. The
sample of a process is the difference between both sides, in percent, of the time that a tenth of the steps do not
exceed: other work on a shared machine only adds time.

Instructions: a loop of pure Python, which has the most user statements per second, counted by valgrind for each
interpreter of `--count`. The count is exact where times are not: on a loaded machine, times of one program vary by more
than the limit. These interpreters need no torch.

Start: processes that only import torch and the program, alternately without coverage, with coverage, and with the
alternative that reports every line of every file (`every_line`) instead of every function.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.provenance import measurement_context  # noqa: E402
from benchmarks.timing_pairs import percent_more  # noqa: E402
from nsa_harness import protocol  # noqa: E402
from nsa_harness.core.experiment.statistics import student_quantile  # noqa: E402

PROGRAMS = ("nanogpt", "per_token", "data_heavy")
LIMIT_PERCENT = 0.5
CONFIDENCE = 0.95
_BOOTSTRAP = REPOSITORY / "harness" / "nsa_harness" / "probe" / "bootstrap"

PROGRAM_SOURCE = '''
"""Three small training programs; `step()` runs one step of the program that the command line names."""
import random, sys
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (each.view(b, t, self.heads, c // self.heads).transpose(1, 2) for each in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary=128, width=64, layers=2, length=32):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_on(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def nanogpt():
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        ids = torch.randint(0, 128, (4, 33))
        train_on(model, optimizer, model(ids[:, :-1], ids[:, 1:]))

    return step


def per_token():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    words = [f"w{number}" for number in range(97)]

    def encode(text):
        ids = []
        for word in text:
            number = 0
            for letter in word:
                if letter == "w":
                    number = number * 31 + 7
                else:
                    number = number * 31 + ord(letter)
            if number % 2:
                ids.append(number % 8)
            else:
                ids.append((number // 2) % 8)
        return ids

    def step():
        counts = [0] * 8
        for number in encode(words * 10):
            counts[number] += 1
        x = torch.tensor(counts, dtype=torch.float32)
        train_on(model, optimizer, model(x).square().mean())

    return step


def data_heavy():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 10**9

        def __getitem__(self, index):
            line = ",".join(str((index * 7 + column) % 101) for column in range(16))
            fields = [float(field) for field in line.split(",")]
            total = sum(fields) or 1.0
            return torch.tensor([field / total for field in fields]), float(index % 2)

    def collate(items):
        rows, labels = [], []
        for row, label in items:
            rows.append(row)
            labels.append(label)
        return torch.stack(rows), torch.tensor(labels)

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = iter(torch.utils.data.DataLoader(Rows(), batch_size=32, collate_fn=collate))

    def step():
        rows, labels = next(batches)
        train_on(model, optimizer, nn.functional.mse_loss(model(rows).squeeze(1), labels))

    return step
'''

DRIVER = """
import json, sys, time, types
import coverage_program
name, rounds, round_steps, dropped = sys.argv[1], *map(int, sys.argv[2:5])
monitoring = sys.monitoring
tool = next(tool for tool in range(6) if monitoring.get_tool(tool) == "nsa-harness coverage")
step = getattr(coverage_program, name)()

def codes_in(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)

functions = [value for value in vars(coverage_program).values() if isinstance(value, (types.FunctionType, type))]
codes = [
    code
    for value in functions
    for function in ([value] if isinstance(value, types.FunctionType) else vars(value).values())
    if isinstance(function, types.FunctionType)
    for code in codes_in(function.__code__)
]

def switch(on):
    monitoring.set_events(tool, monitoring.events.PY_START if on else 0)
    for code in codes:
        monitoring.set_local_events(tool, code, monitoring.events.LINE if on else 0)

for _ in range(20):
    step()
samples = {True: [], False: []}
for number in range(rounds):
    on = number % 4 in (0, 3)
    switch(on)
    for position in range(round_steps):
        wall, processor = time.perf_counter(), time.process_time()
        step()
        if position >= dropped:
            samples[on].append((time.perf_counter() - wall, time.process_time() - processor))
print(json.dumps([samples[True], samples[False]]))
"""

LOOP = """
import sys
def encode(words):
    numbers = []
    for word in words:
        number = 0
        for letter in word:
            if letter == "w":
                number = number * 31 + 7
            else:
                number = number * 31 + ord(letter)
        if number % 2:
            numbers.append(number % 8)
        else:
            numbers.append((number // 2) % 8)
    return numbers
def main():
    words = [f"w{number}" for number in range(97)]
    for _ in range(int(sys.argv[1])):
        encode(words)
main()
"""
COUNTED = (100, 600)  # passes of the loop; the difference of both counts leaves out the start

START = """
import sys, time
begin = time.process_time()
if sys.argv[1] == "every_line":
    monitoring = sys.monitoring
    monitoring.use_tool_id(3, "every line")
    monitoring.register_callback(3, monitoring.events.LINE, lambda code, line: monitoring.DISABLE)
    monitoring.set_events(3, monitoring.events.LINE)
import coverage_program
print(time.process_time() - begin)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="a Python 3.12 or later with torch")
    parser.add_argument("--processes", type=int, default=12, help="processes for each program")
    parser.add_argument("--rounds", type=int, default=80, help="rounds of ten steps in each process")
    parser.add_argument("--starts", type=int, default=10, help="processes for each way to start")
    parser.add_argument("--count", nargs="*", default=[], help="Pythons whose instructions valgrind counts")
    parser.add_argument("--quick", action="store_true", help="only check that everything runs")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "coverage_cost.json")
    options = parser.parse_args()
    if options.quick:
        options.processes, options.rounds, options.starts = 2, 8, 1
    context = measurement_context(__file__, sys.argv[1:])
    for path in (options.python, *options.count):
        context["command"] = context["command"].replace(path, "PATH")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "coverage_program.py").write_text(PROGRAM_SOURCE)
        versions = "import sys, torch; print(sys.version.split()[0], torch.__version__)"
        python, torch = _run(options.python, folder, "-c", versions).split()
        samples = _samples(options, folder)
        Path(folder, "loop.py").write_text(LOOP)
        samples["instructions"] = [_instructions(path, folder) for path in options.count]
    result = {
        **context,
        "versions": {"python": python, "torch": torch},
        "limit_percent": LIMIT_PERCENT,
        "summary": _summary(samples),
        "samples": samples,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))
    within = all(each["cpu_percent"]["mean"] <= LIMIT_PERCENT for each in result["summary"]["steps"].values())
    return 0 if within or options.quick else 1


def _samples(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in PROGRAMS}
    for _ in range(options.processes):
        for name in PROGRAMS:
            mode = {protocol.ENV_COVERAGE: "on"}
            arguments = (name, str(options.rounds), "10", "3")
            text = _run(options.python, folder, "-c", DRIVER, *arguments, probe=True, **mode)
            steps[name].append(_differences(*json.loads(text)))
    starts: dict[str, list[float]] = {"off": [], "on": [], "every_line": []}
    for _ in range(options.starts):
        for way, times in starts.items():
            mode = {protocol.ENV_COVERAGE: "on" if way == "on" else "off"}
            times.append(float(_run(options.python, folder, "-c", START, way, probe=True, **mode)))
    return {"steps": steps, "start_cpu_s": starts}


def _instructions(python: str, folder: str) -> dict[str, Any]:
    """Return the instructions of one pass of the loop, and how much more they are with coverage, in percent."""
    version = _run(python, folder, "-c", "import sys; print(sys.version.split()[0])").strip()
    tool = ["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", python, f"{folder}/loop.py"]
    counts = {}
    for mode in ("off", "on"):
        env = {protocol.ENV_COVERAGE: mode, "PYTHONHASHSEED": "0"}
        totals = [_run("valgrind", folder, *tool, str(passes), probe=True, **env) for passes in COUNTED]
        few, many = (int(re.search(r"I\s+refs:\s+([\d,]+)", text)[1].replace(",", "")) for text in totals)  # type: ignore[index]
        counts[mode] = (many - few) / (COUNTED[1] - COUNTED[0])
    return {"python": version, **counts, "percent": 100 * (counts["on"] / counts["off"] - 1)}


def _differences(on: list[list[float]], off: list[list[float]]) -> dict[str, float]:
    """Return the typical times of one process and how much more a step takes with coverage, in percent."""
    sides = [[[step[kind] for step in side] for side in (on, off)] for kind in (0, 1)]
    (wall_on, wall_off), (cpu_on, cpu_off) = sides
    return {
        "step_ms": 1e3 * statistics.median(wall_off),
        "step_cpu_ms": 1e3 * statistics.median(cpu_off),
        "wall_percent": percent_more(_tenth, wall_on, wall_off),
        "cpu_percent": percent_more(_tenth, cpu_on, cpu_off),
    }


def _tenth(times: Sequence[float]) -> float:
    """Return the time that a tenth of the steps do not exceed."""
    return sorted(times)[len(times) // 10]


def _summary(samples: dict[str, Any]) -> dict[str, Any]:
    starts = {way: statistics.median(times) for way, times in samples["start_cpu_s"].items()}
    return {
        "steps": {
            name: {
                "step_ms": statistics.median(each["step_ms"] for each in processes),
                **{kind: _mean([each[kind] for each in processes]) for kind in ("wall_percent", "cpu_percent")},
            }
            for name, processes in samples["steps"].items()
        },
        "instructions_percent": {each["python"]: each["percent"] for each in samples["instructions"]},
        "start_cpu_s": starts,
    }


def _mean(values: list[float]) -> dict[str, float]:
    """Return the mean with its confidence interval (Student's t)."""
    margin = student_quantile(CONFIDENCE, len(values) - 1) * statistics.stdev(values) / sqrt(len(values))
    mean = statistics.mean(values)
    return {"mean": mean, "low": mean - margin, "high": mean + margin, "median": statistics.median(values)}


def _run(python: str, folder: str, *arguments: str, probe: bool = False, **more: str) -> str:
    """Return what a process of `python` prints, with the probe of a rank if `probe` is true."""
    env = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", **more}
    with tempfile.TemporaryDirectory() as directory:
        if probe:
            env |= {
                "PYTHONPATH": os.pathsep.join([str(_BOOTSTRAP), folder]),
                protocol.ENV_PROBE_DIRECTORY: directory,
                "RANK": "0",
                "WORLD_SIZE": "1",
            }
        done = subprocess.run([python, *arguments], env=env, capture_output=True, text=True, check=False)
        trouble = [path.read_text() for path in Path(directory).glob("*.trouble.jsonl")]
    if done.returncode or trouble:
        raise SystemExit(f"{arguments[:1]} failed: {done.stderr[-2000:]} {trouble}")
    return done.stderr if python == "valgrind" else done.stdout


if __name__ == "__main__":
    sys.exit(main())
