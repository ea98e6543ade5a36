"""Twelve programs as strangers write them, healthy, hanging and failing, by `run`, `watch` and `attach`.

A case is named PROGRAM/FAULT/WAY; truth/twelve.toml says what is right. The programs need an interpreter with torch,
lightning, accelerate and transformers (`--python`), the harness's own needs none of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from evaluation.experiments import PROGRAMS as FOLDERS
from evaluation.experiments import Cell, Experiment, Results, truths_of
from evaluation.launching import Place, Ran, harness, scratch, without_paths
from evaluation.scoring import Row, Truth, compare, paragraph, share

HOME = FOLDERS / "twelve"
FAULTS = ("none", "hang", "fail")
WAYS = ("run", "watch", "attach")
PARTS = ("verdict", "cause", "rank", "line")
LIMITS = ("limits.open_wait_s=20",)
DEADLINE_S = 150
SILENT_S = 6.0  # a job that was started for `attach` and printed nothing for so long hangs
LONG = 20000  # steps that outlast every look
TORCHRUN = "{python} -m torch.distributed.run --standalone --nproc-per-node={ranks}"
ALONE = "{python}"


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a stranger starts it, and what is true of its faults."""

    name: str
    about: str
    hang: Mapping[str, Any]  # verdict, causes, ranks, lines: texts that lines of the program begin with
    fail: Mapping[str, Any]
    rate: int  # steps in two seconds: a failure that `attach` shall see is planted so far behind the first step
    ranks: int = 2
    starts: str = TORCHRUN
    module: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        return ("-m", self.name) if self.module else (f"{self.name}.py",)

    @property
    def files(self) -> list[Path]:
        file = HOME / (self.name.replace(".", "/") + ".py")
        return sorted(file.parent.glob("*.py")) if self.module else [file]

    def launched(self, python: str) -> list[str]:
        known = {"python": python, "ranks": str(self.ranks), "bin": str(Path(python).parent)}
        return [word.format(**known) for word in (*self.starts.split(), *self.words)]

    def places(self, text: str) -> list[tuple[str, int, int]]:
        """The lines of the program that begin with a text."""
        return [
            (path.name, number, number)
            for path in self.files
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if line.strip().startswith(text) or f" {text}" in line
        ]

    def truth(self, fault: str) -> Truth:
        """What is right to say: any of the causes, any of the sets of ranks, any of the lines."""
        stored = {"hang": self.hang, "fail": self.fail}[fault]
        return Truth(
            verdict=stored["verdict"],
            causes=frozenset(stored["causes"]),
            ranks=frozenset(map(tuple, stored["ranks"])),
            places=tuple(place for text in stored["lines"] for place in self.places(text)),
        )


PROGRAMS = {name: Program(name=name, **stored) for name, stored in truths_of("twelve").items()}


def parts_of(case: str) -> tuple[Program, str, str]:
    name, fault, way = case.split("/")
    return PROGRAMS[name], fault, way


def digests() -> dict[str, str]:
    files = sorted(HOME.glob("**/*.py"))
    return {str(path.relative_to(HOME)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}


def launch(case: str, python: str = sys.executable) -> dict[str, Any]:
    """Return what was said of one program, by one way."""
    program, fault, way = parts_of(case)
    with scratch(HOME) as place:
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if way == "attach":
            ran = _attached(program, fault, python, place, environment)
        else:
            ran = place.ran(_command(program, fault, way, python), DEADLINE_S + 90, **environment)
        said = said_of(place, ran, attach=way == "attach")
        return json.loads(without_paths(json.dumps(said), place.folder, python))  # type: ignore[no-any-return]


def _command(program: Program, fault: str, way: str, python: str) -> list[str]:
    """`run`, or `watch`, which ends the job on its own."""
    if way == "watch":
        options = ["--on-hang=kill", f"--deadline={DEADLINE_S}", *LIMITS, "--out=reports"]
        return [harness(), "watch", *options, "--", *program.launched(python), "--fault", fault]
    ranks = 1 if program.starts == ALONE and "spawn" in program.about else program.ranks
    options = [*program.words, f"--ranks={ranks}", f"--python={python}", f"limits.deadline_s={DEADLINE_S}"]
    return [harness(), "run", *options, *LIMITS, "--out=reports", "--", "--fault", fault]


def _attached(program: Program, fault: str, python: str, place: Place, environment: Mapping[str, str]) -> Ran:
    """Attach to a job that a stranger started: while it trains, once it hangs, or just before it fails."""
    words = ["--fault", fault]
    if fault == "none":
        words += ["--steps", str(LONG)]
    elif fault == "fail":
        words += ["--steps", str(LONG), "--at", str(program.rate)]
    with _running([*program.launched(python), *words], place, environment) as job:
        job.wait_for_a_step()
        if fault == "hang":
            job.wait_for_silence(may_end=program.hang["verdict"] == "FAIL")
        return place.ran([harness(), "attach", str(job.pid), "--for=60", *LIMITS, "--out=reports"], 150, **environment)


class Job:
    """A job that the harness did not start, whose output is read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid
        self.lines: list[str] = []
        self.newest_s = time.monotonic()
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append(line)
            self.newest_s = time.monotonic()

    def wait_for_a_step(self) -> None:
        until_s = time.monotonic() + 90
        while not any("step" in line for line in self.lines):
            self._check(until_s, "the job did not begin to train")
            time.sleep(0.05)

    def wait_for_silence(self, *, may_end: bool) -> None:
        until_s = time.monotonic() + 120
        while time.monotonic() - self.newest_s < SILENT_S:
            if may_end and self.process.poll() is not None:
                return
            self._check(until_s, "the job did not hang")
            time.sleep(0.2)

    def _check(self, until_s: float, otherwise: str) -> None:
        if self.process.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(f"{otherwise}:\n" + "".join(self.lines[-20:]))


@contextmanager
def _running(command: Sequence[str], place: Place, environment: Mapping[str, str]) -> Iterator[Job]:
    theirs = Place(folder=place.folder)  # with a tag of its own: the end of `attach` must not end the job
    process = subprocess.Popen(
        command, cwd=place.folder, env=theirs.environment(**environment), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield Job(process)
    finally:
        theirs.kill_all()
        process.wait(timeout=30)


def said_of(place: Place, ran: Ran, *, attach: bool) -> dict[str, Any]:
    """Return the final outcome, and when what was said: counted from the last progress, by `attach` from its start."""
    report = place.stored("report.json")
    if report is None:
        nothing = dict.fromkeys(("verdict", "cause", "summary", "file", "line", "confidence", "first_s", "verdict_s"))
        return {"code": ran.code, **nothing, "ranks": [], "rows": [], "answer": ran.output.splitlines()[-5:]}
    outcome = next(outcome for outcome in report["outcomes"][::-1] if outcome["final"])
    events = place.stored("events.jsonl")
    culprit, findings = outcome.get("culprit") or {}, outcome.get("findings") or []
    found_at = culprit.get("place") or (findings[0].get("place") if findings else None) or {}
    told_s = {event["event"]: event["t_s"] for event in reversed(events)}
    first_s, verdict_s = told_s.get("look"), told_s.get("outcome")
    if not attach:
        quiet = [_QUIET.search(event["text"]) for event in events if event["event"] == "suspect"]
        first_s = next((float(match[1]) for match in quiet if match), None)
        verdict_s = (outcome.get("timing") or {}).get("detected_s")
    return {
        "code": ran.code,
        "verdict": outcome["verdict"],
        "cause": outcome.get("cause"),
        "summary": outcome["summary"],
        "ranks": culprit.get("ranks") or [],
        "file": Path(found_at["file"]).name if found_at.get("file") else None,
        "line": found_at.get("line"),
        "confidence": findings[0]["confidence"] if findings and outcome.get("cause") else None,
        "beside": [finding["code"] for finding in findings[1:]],
        "first_s": None if first_s is None else round(first_s, 1),
        "verdict_s": None if verdict_s is None else round(verdict_s, 1),
        "rows": [row["stands_in"] for row in (outcome.get("detail") or {}).get("standings") or []],
        "answer": answer_of(ran.output),
    }


_QUIET = re.compile(r"(?:moved|made progress) for ([0-9.]+) s")
_HEAD = re.compile(r"^(?:nsa-harness: )?(HANG|FAIL|PASS|ERROR|SKIP|MOVES|STALL)  \S")


def answer_of(output: str) -> list[str]:
    """The first five lines of the answer that have words, from the last headline on."""
    lines = output.splitlines()
    heads = [number for number, line in enumerate(lines) if _HEAD.match(line)]
    below = [line.removeprefix("nsa-harness:").rstrip() for line in lines[heads[-1] if heads else 0 :]]
    worded = [line for line in below if line.strip()]
    return worded[:5] if heads else [line.strip() for line in worded[-5:]]


def wrong(case: str, cell: Cell) -> list[str]:
    """The parts that are not right. Nothing more is asked of an answer whose verdict is wrong."""
    program, fault, way = parts_of(case)
    if fault == "none":
        right = (cell["verdict"], cell["cause"]) == (("ERROR", "still_running") if way == "attach" else ("PASS", None))
        return [] if right else ["verdict"]
    if way == "attach" and _is_excused(program, fault, cell):
        return []
    right_parts = compare(program.truth(fault), cell)
    return [part for part in PARTS if right_parts[part] is False] if right_parts["verdict"] else ["verdict"]


def _is_excused(program: Program, fault: str, cell: Cell) -> bool:
    """Whether `attach` cannot know better: the job made progress, has ended, or only a part of it is left."""
    if fault == "hang":
        return program.hang["verdict"] == "FAIL" and cell["verdict"] is None
    left = f"{cell['verdict']} {cell['cause']}" == program.fail.get("attached")
    return left or cell["cause"] == "still_running"


def describe(case: str, cell: Cell) -> str:
    return f"{cell['verdict'] or '-':5} {cell['cause'] or '-':28} wrong: {wrong(case, cell)}"


def _counts(done: Mapping[str, Sequence[str]], way: str) -> Row:
    """How many cases of a way are right, part by part. Parts count if the verdict is right and there is a fault."""
    own = {case: missed for case, missed in done.items() if case.endswith(f"/{way}")}
    judged = [missed for case, missed in own.items() if parts_of(case)[1] != "none" and "verdict" not in missed]
    verdicts = share("verdict" not in missed for missed in own.values())
    return {"verdict": verdicts, **{part: share(part not in missed for missed in judged) for part in PARTS[1:]}}


def _done(results: Results) -> dict[str, list[str]]:
    return {case: wrong(case, results["cells"][case]) for case in EXPERIMENT.cases if case in results["cells"]}


def rows(results: Results) -> dict[str, Row]:
    done = _done(results)
    cases = {way: str(sum(case.endswith(f"/{way}") for case in done)) for way in WAYS}
    return {f"twelve, {way}": {"cases": cases[way], **_counts(done, way)} for way in WAYS}


EXPERIMENT = Experiment(
    name="twelve",
    cases=tuple(f"{name}/{fault}/{way}" for name in PROGRAMS for fault in FAULTS for way in WAYS),
    launch=launch,
    describe=describe,
    rows=rows,
    facts=lambda: {"programs": digests()},
    takes_python=True,
)


def section(results: Results) -> list[str]:
    """Return the section of accuracy.md: the totals, the answer for each program, and each mistake."""
    cells, done = results["cells"], _done(results)
    commits = sorted({cell["commit"][:7] for cell in cells.values()})
    lines = [
        "## Twelve programs under run, watch and attach",
        "",
        *paragraph(
            """
            The twelve programs in `evaluation/programs/twelve` have 40 to 110 lines and use common frameworks. Each
            exists in three forms: healthy, with a hang, and with a failure. Each form ran under `run`, `watch` and
            `attach`. `attach` was started while the healthy job trained, some time after the hang began, or shortly
            before the failure. Some rules were improved with these programs in view.
            """
        ),
        "",
        *paragraph(
            f"""
            The runs used torch {results["versions"]["torch"]}, gloo, and {results["cpus"]} cores shared with other
            work, several at a time, at commit {", ".join(commits)} ({results["date"][:10]}). Lightning, accelerate
            and transformers ran in their own Python environment (`--python`). {len(done)} of {len(EXPERIMENT.cases)}
            runs are done.
            """
        ),
        "",
        f"| right answers | {' | '.join(PARTS)} |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(f"| `{way}` | {' | '.join(_counts(done, way)[part] for part in PARTS)} |" for way in WAYS),
        "",
        *paragraph(
            """
            Rank, cause and line are counted for the forms with a fault and a right verdict. In the next table, `still
            running` is right: the job had not failed yet when `attach` observed it. `no report` is right too: the job
            had ended before `attach` could start. The last two columns give the seconds until the first message about
            the problem and until the verdict, for `run`, `watch` and `attach`. For `run` and `watch` they count from
            the last progress, and for `attach` from its start. `-` means that there is no such time.
            """
        ),
        "",
        "| program | fault | run | watch | attach | first message (s) | verdict (s) |",
        "| --- | --- | --- | --- | --- | ---: | ---: |",
        *(_line(program, fault, cells, done) for program in PROGRAMS.values() for fault in FAULTS),
        "",
    ]
    missed = {case: parts for case, parts in done.items() if parts}
    misses = (f"- `{case}`: wrong {', '.join(parts)}. Answer: {_said(cells[case])}." for case, parts in missed.items())
    return [*lines, "Wrong answers:" if missed else "No answer is wrong.", "", *misses, ""]


def _line(program: Program, fault: str, cells: Mapping[str, Cell], done: Mapping[str, Sequence[str]]) -> str:
    own = [f"{program.name}/{fault}/{way}" for way in WAYS]
    answers = [_answer(cells.get(case), done.get(case, [])) for case in own]
    times = [" / ".join(_s((cells.get(case) or {}).get(key)) for case in own) for key in ("first_s", "verdict_s")]
    about = f"{program.about} (`{program.name}`)" if fault == "none" else ""
    return f"| {about} | {fault} | {' | '.join([*answers, *(times if fault != 'none' else ('', ''))])} |"


def _answer(cell: Cell | None, missed: Sequence[str]) -> str:
    """Verdict and cause, and what is wrong of them."""
    if cell is None:
        return "-"
    moves = cell["cause"] == "still_running"
    said = "still running" if moves else f"{cell['verdict'] or 'no report'} {cell['cause'] or ''}".strip()
    return f"{said}; **wrong: {', '.join(missed)}**" if missed else said


def _said(cell: Cell) -> str:
    place = f" at {cell['file']}:{cell['line']}" if cell["file"] else ""
    return f"{cell['verdict']} {cell['cause'] or ''}{place}, ranks {cell['ranks']}"


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"
