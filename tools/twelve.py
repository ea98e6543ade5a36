"""Twelve programs as strangers write them, healthy, hanging and failing, by `run`, `watch` and `attach`.

    python tools/twelve.py run --python PATH [--only 'plain_ddp*'] [--jobs N]    runs what has no cell yet, or matches
    python tools/twelve.py page                                                  writes the table into docs/accuracy.md

PATH is an interpreter with torch, lightning, accelerate and transformers; the harness's own needs none of them. What is
true of each stands below; what was said of it is kept in benchmarks/results/twelve.json. A cell is named
PROGRAM/FAULT/WAY.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parents[1]
HOME = REPOSITORY / "tests" / "programs" / "twelve"
RESULTS = REPOSITORY / "benchmarks" / "results" / "twelve.json"
FAULTS = ("none", "hang", "fail")
WAYS = ("run", "watch", "attach")
LINES = 2  # by so many a named line may be off
LIMITS = ("limits.open_wait_s=20",)
DEADLINE_S = 150
SILENT_S = 6.0  # of a job that was started for `attach`: so long without a line, it hangs
LONG = 20000  # steps that no look outlasts


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What is right to say. A cause of several is right; of the ranks one of the sets."""

    verdict: str
    causes: frozenset[str]
    ranks: tuple[tuple[int, ...], ...]
    lines: tuple[str, ...]  # text of lines of the program, any of which a person may begin at
    attached: str = ""  # verdict and cause that are right as well for who sees only what is left of it


@dataclass(frozen=True, kw_only=True)
class Program:
    """One of the twelve: how a stranger starts it, and what is true of its faults."""

    name: str
    about: str
    hang: Truth
    fail: Truth
    ranks: int = 2
    starts: tuple[str, ...] = ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node={ranks}")
    module: bool = False
    rate: int  # steps in two seconds: how far behind the first one a failure is planted that `attach` shall see

    @property
    def words(self) -> tuple[str, ...]:
        return ("-m", self.name) if self.module else (f"{self.name}.py",)

    @property
    def file(self) -> Path:
        return HOME / (self.name.replace(".", "/") + ".py")

    def launched(self, python: str) -> list[str]:
        words = (*self.starts, *self.words)
        known = {"python": python, "ranks": str(self.ranks), "bin": str(Path(python).parent)}
        return [word.format(**known) for word in words]


def truth(verdict: str, causes: str, ranks: Sequence[tuple[int, ...]], *lines: str, attached: str = "") -> Truth:
    known = frozenset(causes.split())
    return Truth(verdict=verdict, causes=known, ranks=tuple(ranks), lines=lines, attached=attached)


ALONE = ("{python}",)
PROGRAMS = (
    Program(
        name="plain_ddp",
        about="DDP in a plain loop",
        hang=truth(
            "HANG", "rank0_only_collective", [(0,)],
            "dist.all_gather(values, value)", "if everyone or rank == 0:", "score = validate(",
        ),
        fail=truth("FAIL", "exception", [(1,)], "loss = nn.functional.mse_loss(model(x), y)", "x = x[:, :12]"),
        rate=1200,
    ),
    Program(
        name="own_loader",
        about="own Dataset, DataLoader workers",
        hang=truth(
            "HANG", "dataloader_worker_blocked", [(1,)],
            "data += self.connection.recv(size - len(data))", "(size,) = struct.unpack(",
        ),
        fail=truth("FAIL", "exception", [(1,)], "features, label = record[:8], record[8]", "record = record[:-1]"),
        rate=600,
    ),
    Program(
        name="translate.train",
        about="a package, -m",
        hang=truth(
            "HANG", "uneven_inputs", [(0,), (1,)],
            "usable = len(items)", "return items[:usable]", "for step, (source, target)", "mine = shard(",
        ),
        fail=truth("FAIL", "early_exit", [(1,)], "if step == stop_at and rank == 1:", 'if args.fault == "fail" and'),
        module=True,
        rate=400,
    ),
    Program(
        name="lit_classifier",
        about="Lightning",
        hang=truth(
            "HANG", "rank0_only_collective rank_conditional_collective collective_order_mismatch", [(0,)],
            "trainer.save_checkpoint(self.path)", "if trainer.is_global_zero or not self.only_first:",
        ),
        fail=truth(
            "FAIL", "unused_params exception", [(0, 1), (0,), (1,), ()],
            'if self.fault != "fail"', "loss = loss + 0.1", "self.auxiliary = nn.Linear(32, 2)", "trainer.fit(",
        ),
        starts=ALONE,
        rate=600,
    ),
    Program(
        name="accelerated",
        about="accelerate",
        hang=truth(  # gloo ends the rank that receives more than it has room for
            "FAIL", "shape_mismatch", [(0,), (1,), (0, 1)],
            "accelerator.gather_for_metrics(", "if pad:", "accuracy = evaluate(",
        ),
        fail=truth("FAIL", "exception", [(1,)], "raise FloatingPointError(", 'loss = loss * float("inf")'),
        starts=(
            "{bin}/accelerate", "launch", "--multi_gpu", "--num_processes={ranks}", "--num_machines=1",
            "--mixed_precision=no", "--dynamo_backend=no",  # with --cpu it starts one process
        ),
        rate=500,
    ),
    Program(
        name="sharded",
        about="FSDP2",
        hang=truth(
            "HANG", "rank_conditional_collective collective_order_mismatch shape_mismatch", [(0,), (1,), (0, 1)],
            "if self.dice.random() < self.drop_rate:", "x = block(x)", "model.dice = random.Random(rank)",
        ),
        fail=truth("FAIL", "exception", [(0,)], "x = self.embed(tokens)", "tokens[0, 3] = 100"),
        rate=100,
    ),
    Program(
        name="spawned_workers",
        about="mp.spawn",
        hang=truth(
            "HANG", "blocked_io pipe_full", [(1,)],
            "while (path := queues[rank].get())", "fed.pop()", "queue.put(None)",
        ),
        fail=truth("FAIL", "exception", [(1,)], "x = torch.load(path)", 'path = folder / "part-8.pt"'),
        starts=ALONE,
        rate=1200,
    ),
    Program(
        name="one_process",
        about="no torch.distributed",
        hang=truth(
            "HANG", "thread_died swallowed_exception lock_cycle", [(0,)],
            "while (tokens := ready.get())", "raise ValueError(", "except ValueError as error:",
        ),
        fail=truth(
            "FAIL", "exception", [(0,)], "loss = nn.functional.cross_entropy(model(tokens[:-1])",
            attached="HANG shutdown_hang",
        ),
        ranks=1,
        starts=ALONE,
        rate=3000,
    ),
    Program(
        name="hf_trainer",
        about="transformers.Trainer",
        hang=truth(  # gloo ends the rank that receives more than it has room for
            "FAIL",
            "uneven_inputs rank_conditional_collective collective_order_mismatch",
            [(0,), (1,)],
            "control.should_training_stop = True", "if self.good_enough(args, state):",
            "return arguments.process_index", "trainer.train()",
        ),
        fail=truth("FAIL", "exception", [(1,)], "trainer.train()", "tokens = tokens[:-3]"),
        rate=150,
    ),
    Program(
        name="pipeline",
        about="pipeline and tensor parallel, 4 groups",
        hang=truth(
            "HANG", "p2p_unmatched", [(3,)],
            "dist.recv(received, src=partner)", "for x in micro_batches:", "micro_batches = torch.randn(5, 8",
        ),
        fail=truth("FAIL", "exception", [(1, 3), (1,), (3,)], "dist.broadcast(result", "lane = (1, 2, lanes[1])"),
        ranks=4,
        rate=300,
    ),
    Program(
        name="checkpoints",
        about="rank 0 evaluates and saves",
        hang=truth(
            "HANG", "lock_cycle", [(1,), (0, 1), (0,)],
            "fcntl.flock(file, fcntl.LOCK_EX)", "with locked(folder):", "dist.barrier()",
        ),
        fail=truth("FAIL", "exception", [(0,)], "with open(folder", "with locked(folder):"),
        rate=1200,
    ),
    Program(
        name="accumulate",
        about="no_sync, checkpointed blocks",
        hang=truth(
            "HANG", "swallowed_exception rank_conditional_collective collective_order_mismatch", [(1,)],
            "dist.barrier()", "except OverflowError as error:", "clip(loss.item(), 1e5)", "raise OverflowError(",
        ),
        fail=truth(
            "FAIL", "checkpoint_recompute_mismatch", [(0, 1), (0,), (1,)],
            "loss.backward()", "x = checkpoint(block", "network.blocks[1].cache", "if self.cache is None:",
        ),
        rate=200,
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run")
    run.add_argument("--python", default=sys.executable)
    run.add_argument("--only", default="")
    run.add_argument("--jobs", type=int, default=1)
    run.add_argument("--results", type=Path, default=RESULTS)
    commands.add_parser("page")
    asked = parser.parse_args()
    if asked.command == "page":
        write_page()
        return
    cells = load(asked.results)["cells"]
    due = [name for name in names() if (fnmatchcase(name, asked.only) if asked.only else name not in cells)]
    with ThreadPoolExecutor(asked.jobs) as pool:
        for name, cell in pool.map(lambda name: (name, cell_of(name, asked.python)), due):
            keep(asked.results, name, cell)
            print(
                f"{name:30} {cell['verdict'] or '-':5} {cell['cause'] or '-':28} wrong: {wrong(name, cell)}", flush=True
            )


def names() -> list[str]:
    return [f"{program.name}/{fault}/{way}" for program in PROGRAMS for fault in FAULTS for way in WAYS]


def load(results: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {"cells": {}}
    return known


def keep(results: Path, name: str, cell: Mapping[str, Any]) -> None:
    """Read anew: another slice may have written meanwhile."""
    sys.path.insert(0, str(REPOSITORY))
    from benchmarks.circumstances import circumstances

    known = load(results)
    about = circumstances(__file__, ["run"])
    values = {**about, "programs": digests(), "cells": {**known["cells"], name: {**cell, "commit": about["commit"]}}}
    results.write_text(json.dumps(values, indent=1) + "\n")


def digests() -> dict[str, str]:
    files = sorted(HOME.glob("**/*.py"))
    return {str(path.relative_to(HOME)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}


def program_of(name: str) -> tuple[Program, str, str]:
    program, fault, way = name.split("/")
    return next(one for one in PROGRAMS if one.name == program), fault, way


def cell_of(name: str, python: str) -> dict[str, Any]:
    """What was said of one program, from a copy of it in a folder that says nothing."""
    program, fault, way = program_of(name)
    with tempfile.TemporaryDirectory(prefix="job") as scratch:
        folder = Path(scratch) / "project"
        shutil.copytree(HOME, folder)
        (Path(scratch) / "tmp").mkdir()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": f"{scratch}/tmp", "COLUMNS": "100",
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        if way == "attach":
            said = attached(program, fault, python, folder, environment)
        else:
            said = started(program, fault, way, python, folder, environment)
        return json.loads(without_paths(json.dumps(said), folder, python))  # type: ignore[no-any-return]


def without_paths(text: str, folder: Path, python: str) -> str:
    for path, instead in ((str(folder), "project"), (str(folder.parent), ""), (str(Path(python).parents[1]), "/usr")):
        text = text.replace(path, instead)
    return re.sub(r"/[^\s\"]*?/lib/(python3\.\d+)/", r"/usr/lib/\1/", text)


def harness() -> str:
    return str(Path(sys.executable).parent / "nsa-harness")


def started(
    program: Program, fault: str, way: str, python: str, folder: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """By `run` or by `watch`, which ends the job itself."""
    words = ["--fault", fault]
    if way == "run":
        ranks = 1 if program.starts == ALONE and "spawn" in program.about else program.ranks
        asked = [*program.words, f"--ranks={ranks}", f"--python={python}", f"limits.deadline_s={DEADLINE_S}"]
        command = [harness(), "run", *asked, *LIMITS, "--out=reports", "--", *words]
    else:
        asked = ["--on-hang=kill", f"--deadline={DEADLINE_S}", *LIMITS, "--out=reports"]
        command = [harness(), "watch", *asked, "--", *program.launched(python), *words]
    ran = subprocess.run(
        command, cwd=folder, env=dict(environment), check=False, capture_output=True, text=True,
        timeout=DEADLINE_S + 90, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return said_of(folder / "reports", ran.returncode, ran.stdout + ran.stderr, attach=False)


def attached(program: Program, fault: str, python: str, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """To a job that was started as a stranger does: while it trains, once it hangs, or just before it fails."""
    words = ["--fault", fault]
    if fault == "none":
        words += ["--steps", str(LONG)]
    elif fault == "fail":
        words += ["--steps", str(LONG), "--at", str(program.rate)]
    with running([*program.launched(python), *words], folder, environment) as job:
        job.until_it_trains()
        if fault == "hang":
            job.until_it_is_silent(may_end=program.hang.verdict == "FAIL")
        ran = subprocess.run(
            [harness(), "attach", str(job.pid), "--for=60", *LIMITS, "--out=reports"],
            cwd=folder, env=dict(environment), check=False, capture_output=True, text=True, timeout=150,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    return said_of(folder / "reports", ran.returncode, ran.stdout + ran.stderr, attach=True)


class Job:
    """A job of nobody's, whose output is read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self.lines: list[str] = []
        self.newest_s = time.monotonic()
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append(line)
            self.newest_s = time.monotonic()

    def until_it_trains(self) -> None:
        patience = time.monotonic() + 90
        while not any("step" in line for line in self.lines):
            if self.process.poll() is not None or time.monotonic() > patience:
                raise SystemExit("the job did not begin to train:\n" + "".join(self.lines[-20:]))
            time.sleep(0.05)

    def until_it_is_silent(self, *, may_end: bool) -> None:
        patience = time.monotonic() + 120
        while time.monotonic() - self.newest_s < SILENT_S:
            if may_end and self.process.poll() is not None:
                return
            if self.process.poll() is not None or time.monotonic() > patience:
                raise SystemExit("the job did not hang:\n" + "".join(self.lines[-20:]))
            time.sleep(0.2)


@contextmanager
def running(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Job]:
    tag = f"{time.monotonic_ns()}"
    process = subprocess.Popen(
        command, cwd=folder, env={**environment, "TWELVE_TAG": tag}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield Job(process)
    finally:
        for pid in tagged(tag):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=30)


def tagged(tag: str) -> list[int]:
    """The processes of a job: torchrun's ranks have sessions of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"TWELVE_TAG={tag}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def said_of(reports: Path, code: int, output: str, *, attach: bool) -> dict[str, Any]:
    """The newest attempt's outcome, and the times of what was told. Counted: from the last progress, or by `attach`
    from its start."""
    stored = sorted(reports.glob("2*/report.json"))
    if not stored:
        return {"code": code, **dict.fromkeys(("verdict", "cause", "summary", "file", "line", "first_s", "verdict_s")),
                "ranks": [], "confidence": None, "answer": output.splitlines()[-5:], "rows": []}  # fmt: skip
    outcome = next(one for one in json.loads(stored[-1].read_text())["outcomes"][::-1] if one["final"])
    events = [json.loads(line) for line in (stored[-1].parent / "events.jsonl").read_text().splitlines()]
    culprit, findings = outcome.get("culprit") or {}, outcome.get("findings") or []
    place = culprit.get("place") or (findings[0].get("place") if findings else None) or {}
    timing = outcome.get("timing") or {}
    told_s = {one["event"]: one["t_s"] for one in reversed(events)}
    first_s, verdict_s = told_s.get("look"), told_s.get("outcome")
    if not attach:
        quiet = [_QUIET.search(one["text"]) for one in events if one["event"] == "suspect"]
        first_s = next((float(one[1]) for one in quiet if one), None)
        verdict_s = timing.get("detected_s")
    return {
        "code": code,
        "verdict": outcome["verdict"],
        "cause": outcome.get("cause"),
        "summary": outcome["summary"],
        "ranks": culprit.get("ranks") or [],
        "file": Path(place["file"]).name if place.get("file") else None,
        "line": place.get("line"),
        "confidence": findings[0]["confidence"] if findings and outcome.get("cause") else None,
        "beside": [one["code"] for one in findings[1:]],
        "first_s": None if first_s is None else round(first_s, 1),
        "verdict_s": None if verdict_s is None else round(verdict_s, 1),
        "rows": [row["stands_in"] for row in (outcome.get("detail") or {}).get("standings") or []],
        "answer": answer_of(output),
    }  # fmt: skip


_QUIET = re.compile(r"has moved for ([0-9.]+) s")
_HEAD = re.compile(r"^(?:nsa-harness: )?(HANG|FAIL|PASS|ERROR|SKIP|MOVES|STALL)  \S")


def answer_of(output: str) -> list[str]:
    """The first five lines of the answer that have words, from the last headline on."""
    lines = [line.removeprefix("nsa-harness: ") for line in output.splitlines() if line.strip()]
    heads = [number for number, line in enumerate(output.splitlines()) if _HEAD.match(line)]
    if not heads:
        return lines[-5:]
    below = output.splitlines()[heads[-1] :]
    worded = [line.removeprefix("nsa-harness:").rstrip() for line in below if line.removeprefix("nsa-harness:").strip()]
    return worded[:5]


def due(name: str) -> Truth | None:
    """What is to be said of a cell; None of a healthy program."""
    program, fault, _ = program_of(name)
    return {"hang": program.hang, "fail": program.fail}.get(fault)


def wrong(name: str, cell: Mapping[str, Any]) -> list[str]:
    """What is not right of it: of verdict, cause, rank and line; nothing more is asked of one whose verdict is not."""
    program, fault, way = program_of(name)
    told = due(name)
    if told is None:
        right = (cell["verdict"], cell["cause"]) == (("ERROR", "still_running") if way == "attach" else ("PASS", None))
        return [] if right else ["verdict"]
    if way == "attach" and fault == "fail" and cell["cause"] == "still_running":
        return []  # it moved in both looks
    if (way, fault, told.verdict, cell["verdict"]) == ("attach", "hang", "FAIL", None):
        return []  # nothing is left to attach to
    if way == "attach" and f"{cell['verdict']} {cell['cause']}" == told.attached:
        return []
    if cell["verdict"] != told.verdict:
        return ["verdict"]
    lines = [number for text in told.lines for number in numbers(program, text)]
    near = any(abs(number - (cell["line"] or -9)) <= LINES for number in lines)
    asked = {
        "cause": cell["cause"] in told.causes,
        "rank": tuple(cell["ranks"]) in told.ranks,
        "line": near and cell["file"] in {path.name for path in files_of(program)},
    }
    return [part for part, right in asked.items() if not right]


def files_of(program: Program) -> list[Path]:
    return sorted(program.file.parent.glob("*.py")) if program.module else [program.file]


def numbers(program: Program, text: str) -> list[int]:
    """The lines of the program that begin with a text."""
    return [
        number
        for path in files_of(program)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip().startswith(text) or f" {text}" in line
    ]


HEADING = "## Twelve programs, three ways"
PARTS = ("verdict", "cause", "rank", "line")


def page(known: Mapping[str, Any]) -> list[str]:
    """The section of docs/accuracy.md: what was right of each cell, the totals, and each miss."""
    cells = known["cells"]
    done = {name: wrong(name, cells[name]) for name in names() if name in cells}
    commits = sorted({cell["commit"][:7] for cell in cells.values()})
    lines = [
        HEADING,
        "",
        "Programs of 40 to 110 lines as people write them (`tests/programs/twelve`), each healthy, with a hang and"
        " with a failure that differ in kind, under `run`, `watch` and `attach`: to a job that trains, that has hung"
        " for a while, or that is about to fail. Rules were mended with these programs in sight, so this is a"
        " regression table too."
        f" torch {known['versions']['torch']}, gloo, {known['cpus']} cores shared with other work, several cells at a"
        f" time, {known['date'][:10]}, commit {', '.join(commits)}; Lightning, accelerate and transformers in an"
        " interpreter of their own (`--python`). Written by `python tools/twelve.py page`.",
        "",
        "| program | fault | run | watch | attach | first word (s) | verdict (s) |",
        "| --- | --- | --- | --- | --- | ---: | ---: |",
    ]
    for program in PROGRAMS:
        for fault in FAULTS:
            own = [f"{program.name}/{fault}/{way}" for way in WAYS]
            told = [_told(cells.get(name), done.get(name, [])) for name in own]
            times = [
                " / ".join(_s((cells.get(name) or {}).get(key)) for name in own) for key in ("first_s", "verdict_s")
            ]
            about = f"{program.about} (`{program.name}`)" if fault == "none" else ""
            lines.append(f"| {about} | {fault} | {' | '.join([*told, *(times if fault != 'none' else ('', ''))])} |")
    return [*lines, "", *_totals(done), "", *_misses(done, cells), ""]


def _told(cell: Mapping[str, Any] | None, missed: Sequence[str]) -> str:
    """Verdict and cause, and what is wrong of them."""
    if cell is None:
        return "-"
    moves = cell["cause"] == "still_running"
    said = "MOVES" if moves else f"{cell['verdict'] or 'no report'} {cell['cause'] or ''}".strip()
    return f"{said}; **wrong: {', '.join(missed)}**" if missed else said


def _totals(done: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield (
        f"{len(done)} of {len(names())} cells have been run (`-`: not). `run` and `watch` count seconds since the last"
        " progress, `attach` since its own start. Right:"
    )
    yield ""
    for way in WAYS:
        own = {name: missed for name, missed in done.items() if name.endswith(f"/{way}")}
        asked = [missed for name, missed in own.items() if due(name) is not None and "verdict" not in missed]
        parts = [f"verdict {sum('verdict' not in missed for missed in own.values())} of {len(own)}"]
        parts += [f"{part} {sum(part not in missed for missed in asked)} of {len(asked)}" for part in PARTS[1:]]
        yield f"- `{way}`: {', '.join(parts)}"


def _misses(done: Mapping[str, Sequence[str]], cells: Mapping[str, Any]) -> Iterator[str]:
    missed = {name: parts for name, parts in done.items() if parts}
    yield "What it gets wrong:" if missed else "Nothing is wrong in it."
    yield ""
    for name, parts in missed.items():
        cell = cells[name]
        place = f" at {cell['file']}:{cell['line']}" if cell["file"] else ""
        said = f"{cell['verdict']} {cell['cause'] or ''}{place}, ranks {cell['ranks']}"
        yield f"- `{name}`: {', '.join(parts)}; said {said}."


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def write_page() -> None:
    document = REPOSITORY / "docs" / "accuracy.md"
    text = document.read_text()
    before, _, rest = text.partition(f"{HEADING}\n")
    after = rest[rest.index("\n## ") + 1 :] if rest else text[text.index("## Our own corpus") :]
    before = before if rest else text[: text.index("## Our own corpus")]
    document.write_text(before + "\n".join(page(load(RESULTS))) + "\n" + after)


if __name__ == "__main__":
    main()
