"""Bisections of programs whose truth is known: what is said of each, what it took, and whether its commands say so too.

    python tools/bisections.py run [--only 'range_of_layers/*']    runs what has no cell yet, or matches; resumable
    python tools/bisections.py page                                writes the table into docs/accuracy.md

The programs lie in tests/programs/bisected and know nothing of the harness. A cell is one search, named
PROGRAM/SEARCH; cells are kept in benchmarks/results/bisections.json.
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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
from tools.twelve import harness, tagged, without_paths  # noqa: E402

HOME = REPOSITORY / "tests" / "programs" / "bisected"
RESULTS = REPOSITORY / "benchmarks" / "results" / "bisections.json"
RANGES = tuple(combinations(range(9), 2))  # of eight layers, from where to before where
LIMIT_S = 600  # of a search, where nothing else is said
COMMAND_S = 120  # of a printed command; the one without the harness is cut off: a job that hangs has no end of its own
ALONE_S = 30
LEAVE_S = 90
OFTEN = 25  # runs in which a failure that shows in a fifth of them is missed once in 260 times

Answer = tuple[str, tuple[Any, ...]]  # kind and items, as bisect.json has them


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search of a program, and what is right to say of it."""

    name: str
    words: tuple[str, ...]
    right: tuple[Answer, ...]
    candidates: tuple[Any, ...] = ()  # right as well: undecided between just these
    zones: tuple[tuple[str, Any], ...] = ()  # each with its first value; asked for where some are said


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a stranger asks about it."""

    name: str
    what: str
    true: str  # for people
    searches: tuple[Search, ...]
    limit_s: float = LIMIT_S
    flaky: bool = False  # a command may have to be given several times
    slow: bool = False  # its commands differ in time alone
    set_up: Callable[[Path], None] | None = None


def asked(program: str, *words: str, ranks: int = 2) -> tuple[str, ...]:
    return (f"{program}.py", f"--ranks={ranks}", *words)


def layers(program: str, option: str, *words: str) -> tuple[str, ...]:
    return asked(program, "--gc-range=0:8", "--arg", f"--{option}={{layers}}", *words)


def once(words: tuple[str, ...], *right: Answer, **more: Any) -> tuple[Search, ...]:
    return (Search(name="search", words=words, right=right, **more),)


def times(count: int, words: tuple[str, ...], *right: Answer) -> tuple[Search, ...]:
    return tuple(Search(name=f"search {number}", words=words, right=right) for number in range(1, count + 1))


def range_search(start: int, stop: int) -> Search:
    words = asked("range_of_layers", "--gc-range=0:8", "--env-arg", "OFFLOAD={range}", "--", f"{start}:{stop}")
    alone: tuple[Answer, ...] = (("single", (start,)),) if stop - start == 1 else ()
    return Search(name=f"{start}:{stop}", words=words, right=(*alone, ("range", (start, stop))))


def commits(folder: Path) -> None:
    """Eight commits: at the fourth the program cannot be started, and since the fifth it fails."""
    for number in range(1, 9):
        broken = "import loader\nloader.prefetch(4)\n" if number == 4 else ""
        shape = "(4, 8)" if number >= 5 else "(8, 4)"
        (folder / "train.py").write_text(
            f'"""Version {number}."""\nimport torch\nimport torch.distributed as dist\n{broken}\n'
            f'dist.init_process_group("gloo")\nx = torch.ones(2, 8) @ torch.ones{shape}\ndist.all_reduce(x)\n'
            'print("trained", flush=True)\ndist.destroy_process_group()\n'
        )
        if number == 1:
            git(folder, "init", "-q")
            (folder / ".gitignore").write_text("reports/\n__pycache__/\n")
        git(folder, "add", "train.py", ".gitignore")
        git(folder, "commit", "-qm", f"version {number}")


def git(folder: Path, *words: str) -> str:
    known = ["-c", "user.email=a@example.org", "-c", "user.name=a", "-c", "init.defaultBranch=main"]
    command = ["git", *known, *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


PAIR: Answer = ("set", (2, 6))
PROGRAMS = (
    Program(
        name="pair_of_layers",
        what="which of 8 layers are recomputed",
        true="layers 2 and 6 together",
        searches=once(layers("pair_of_layers", "recompute"), PAIR),
    ),
    Program(
        name="triple_of_layers",
        what="which of 8 layers have an expert",
        true="layers 1, 4 and 6 together hang",
        searches=once(layers("triple_of_layers", "experts"), ("set", (1, 4, 6))),
        limit_s=900,
    ),
    Program(
        name="range_of_layers",
        what="a range of 8 layers, by `{range}` alone",
        true="each contiguous range of 8 once",
        searches=tuple(range_search(*edges) for edges in RANGES),
    ),
    Program(
        name="threshold",
        what="length of a sequence, 64 to 128",
        true="from 97 on",
        searches=once(
            asked("threshold", "--seq-len=64:128", "--arg", "--seq-len={value}"), ("threshold", (97,))
        ),
    ),
    Program(
        name="count",
        what="which of 8 layers are sharded",
        true="any 5 layers",
        searches=once(layers("count", "shard-layers"), ("count", (5,))),
    ),
    Program(
        name="pair_of_variables",
        what="6 environment variables of a scenario",
        true="MEAN_IN_HALF and MEAN_SCALED together",
        searches=once(
            ("./pair_of_variables.yaml", "--env"), ("set", ("run.env.MEAN_IN_HALF", "run.env.MEAN_SCALED"))
        ),
    ),
    Program(
        name="commits",
        what="8 commits, the one before the culprit is broken",
        true="since version 5; between 4 and 5 no run can tell",
        searches=once(
            ("train.py", "--commits=HEAD~7..HEAD"), ("threshold", ("version 5",)),
            candidates=("version 4", "version 5"),
        ),
        set_up=commits,
    ),
    Program(
        name="ordered",
        what="5 versions with an order",
        true="from 2.0.1 on",
        searches=once(
            asked("ordered", "--ordered", "format=[1.9, 2.0, 2.0.1, 2.1, 2.2]", "--arg", "--format={value}"),
            ("threshold", ("2.0.1",)),
        ),
    ),
    Program(
        name="masked",
        what="a batch of 8 to 512 rows",
        true="hangs from 401 on; another failure from 250 on",
        searches=once(
            asked("masked", "--seq-len=8:512", "--arg", "--batch={value}"), ("threshold", (401,)),
            candidates=tuple(range(250, 402)),
            zones=(("good", 8), ("different", 250), ("bad", 401)),
        ),
        limit_s=900,
    ),
    Program(
        name="slow",
        what="which of 8 layers are quantised, `--outcome slow`",
        true="layer 5 alone",
        searches=once(layers("slow", "quantise", "--outcome", "slow"), ("single", (5,))),
        slow=True,
        limit_s=900,
    ),
    Program(
        name="flaky",
        what="which of 8 blocks run aside, race in half of the runs",
        true="block 3 alone",
        searches=times(3, layers("flaky", "side-stream", "--", "--race=0.5"), ("single", (3,))),
        flaky=True,
        limit_s=1500,
    ),
    Program(
        name="flaky_rare",
        what="the same, race in a fifth of the runs",
        true="block 3 alone",
        searches=times(3, layers("flaky", "side-stream", "--", "--race=0.2"), ("single", (3,))),
        flaky=True,
        limit_s=1500,
    ),
    Program(
        name="flaky_anyway",
        what="which of 8 layers are fused, while the data is gone in 4 of 10 runs",
        true="it does not depend on the layers",
        searches=times(3, layers("flaky_anyway", "fuse-layers"), ("independent", ())),
        flaky=True,
        limit_s=1500,
    ),
    Program(
        name="healthy",
        what="which of 8 layers are frozen",
        true="nothing to bisect",
        searches=once(layers("healthy", "freeze"), ("none", ())),
    ),
    Program(
        name="open_wait",
        what="which of 8 layers are streamed, limits `auto`",
        true="layers 2 and 5 together wait for a child",
        searches=once(layers("open_wait", "stream"), ("set", (2, 5))),
        limit_s=1500,
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run")
    run.add_argument("--only", default="", help="a pattern of PROGRAM/SEARCH; those are run anew")
    run.add_argument("--limit", type=float, default=0.0, help="seconds after which no further search begins")
    run.add_argument("--results", type=Path, default=RESULTS)
    commands.add_parser("page")
    told = parser.parse_args()
    if told.command == "page":
        write_page()
        return
    begun_s = time.monotonic()
    for name in due(load(told.results)["cells"], told.only):
        if told.limit and time.monotonic() - begun_s > told.limit:
            break
        cell = cell_of(name)
        keep(told.results, name, cell)
        print(f"{name:28} {judged(name, cell):10} {said(cell)}   {cell['seconds']:.0f} s", flush=True)


def names() -> list[str]:
    return [f"{program.name}/{search.name}" for program in PROGRAMS for search in program.searches]


def due(cells: Mapping[str, Any], only: str) -> list[str]:
    """What matches; else what was never run, or whose program is another one since."""
    if only:
        return [name for name in names() if fnmatchcase(name, only)]
    return [name for name in names() if name not in cells or cells[name]["program"] != digest(program_of(name)[0])]


def program_of(name: str) -> tuple[Program, Search]:
    first, _, last = name.partition("/")
    program = next(one for one in PROGRAMS if one.name == first)
    return program, next(one for one in program.searches if one.name == last)


def digest(program: Program) -> str:
    """Of what is searched and how."""
    files = [HOME / word for word in program.searches[0].words[:1] if (HOME / word).is_file()]
    files += [HOME / f"{program.name}.py"] if not files or files[0].suffix != ".py" else []
    texts = [path.read_text() for path in files if path.is_file()]
    made = [program.set_up.__code__.co_code.hex()] if program.set_up else []
    facts = (texts, made, [search.words for search in program.searches])
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def load(results: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {"cells": {}}
    return known


def keep(results: Path, name: str, cell: Mapping[str, Any]) -> None:
    """Read anew: another slice may have written meanwhile."""
    from benchmarks.circumstances import circumstances

    known = load(results)
    about = circumstances(__file__, ["run"])
    cells = {**known["cells"], name: {**cell, "commit": about["commit"]}}
    ordered = {one: cells[one] for one in names() if one in cells}
    results.write_text(json.dumps({**about, "cells": ordered}, indent=1) + "\n")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A command that has ended, or was ended."""

    code: int | None  # None: it did not end in its time
    output: str
    seconds: float


@dataclass(kw_only=True)
class Place:
    """A stranger's folder, in which commands are given as a person gives them."""

    folder: Path
    tag: str = field(default_factory=lambda: os.urandom(8).hex())

    def ran(self, command: str, limit_s: float) -> Ran:
        """In a shell. At its limit it gets a Ctrl-C, and whatever is left of it is ended."""
        environment = {
            **os.environ, "PATH": f"{Path(harness()).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120",
            "TMPDIR": str(self.folder.parent / "tmp"), "TWELVE_TAG": self.tag,
        }  # fmt: skip
        begun_s, ended = time.monotonic(), True
        log = self.folder.parent / "said.txt"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "-c", command], cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                ended = False
                os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LEAVE_S if command.startswith("nsa-harness") else 1)
            finally:
                self._end()
                process.wait(30)
        seconds = time.monotonic() - begun_s
        return Ran(code=process.returncode if ended else None, output=log.read_text(errors="replace"), seconds=seconds)

    def _end(self) -> None:
        """Every process of it, until none is left."""
        while pids := tagged(self.tag):
            with suppress(psutil.NoSuchProcess):
                left = [psutil.Process(pid) for pid in pids]
                for one in left:
                    one.kill()
                psutil.wait_procs(left, timeout=5)

    def stored(self, name: str) -> dict[str, Any] | None:
        """A document of the newest run."""
        found = self.folder / "reports" / "latest" / name
        return json.loads(found.read_text()) if found.is_file() else None

    def newest(self) -> str:
        link = self.folder / "reports" / "latest"
        return os.readlink(link) if link.is_symlink() else ""


def cell_of(name: str) -> dict[str, Any]:
    """One search from a copy of its program in a folder that says nothing, and its commands."""
    program, search = program_of(name)
    with tempfile.TemporaryDirectory(prefix="job") as scratch:
        place = Place(folder=Path(scratch) / "project")
        (Path(scratch) / "tmp").mkdir()
        if program.set_up:
            place.folder.mkdir()
            program.set_up(place.folder)
        else:
            shutil.copytree(HOME, place.folder, ignore=shutil.ignore_patterns("__pycache__"))
        command = " ".join(["nsa-harness", "bisect", *(_quoted(word) for word in search.words)])
        ran = place.ran(command, program.limit_s)
        cell = {
            "program": digest(program),
            "command": command,
            "code": ran.code,
            "seconds": round(ran.seconds, 1),
            **answer_in(place, program),
            "last": ran.output.splitlines()[-12:],
        }
        cell["commands"] = commands_of(place, program)
        said = without_paths(json.dumps(cell), place.folder, sys.executable)
        return json.loads(_RUN.sub("RUN", said))  # type: ignore[no-any-return]


_RUN = re.compile(r"2\d{7}T\d{6}-[0-9a-f]{4}")


def _quoted(word: str) -> str:
    return word if re.fullmatch(r"[\w./=:~,-]+", word) else "'" + word + "'"


def answer_in(place: Place, program: Program) -> dict[str, Any]:
    """What bisect.json says, in words that stay the same from one run to the next."""
    stored = place.stored("bisect.json")
    if stored is None:
        return {"kind": None, "items": [], "open": [], "zones": [], "confidence": None, "probes": 0, "floor": None}
    answer, detail = stored["answer"], stored["detail"]
    subject = detail["subject"]
    labels = [_words(place, program, one) for one in subject["items"]]

    def spans(found: Iterable[Sequence[int]]) -> list[Any]:
        return [labels[number] for start, stop in found for number in range(start, stop)]

    def first(length: int) -> Any:
        return _words(place, program, subject["good"]) if length == 0 else labels[length - 1]

    return {
        "kind": answer["kind"],
        "items": [_words(place, program, one) for one in answer["items"]],
        "open": spans(detail["answer"]["open"]),
        "zones": [[zone["counts_as"], first(zone["start"])] for zone in detail["answer"].get("zones") or []],
        "confidence": detail["answer"]["confidence"],
        "sought": (stored["outcome_sought"] or {}).get("verdict"),
        "probes": len(stored["probes"]),
        "floor": stored["floor_probes"],
    }


def _words(place: Place, program: Program, item: Any) -> Any:
    """A commit by its subject: its number is another one each time."""
    return git(place.folder, "log", "-1", "--format=%s", str(item)) if program.set_up is commits else item


def commands_of(place: Place, program: Program) -> dict[str, Any]:
    """Each command that was printed, given as it stands: whether it does what it was printed for."""
    stored = place.stored("bisect.json")
    if stored is None:
        return {}
    found = stored["commands"]
    sought = (stored["outcome_sought"] or {}).get("verdict")
    searched = place.newest()
    if program.slow:
        return _slow_commands(place, found)
    done: dict[str, Any] = {}
    if found["bad"]:
        done["bad"] = _given(place, found["bad"], OFTEN if program.flaky else 1, sought, until=True)
    if found["good"]:
        done["good"] = _given(place, found["good"], 5 if program.flaky else 1, "PASS", until=False)
    if found["alone"]:
        alone = found["alone"].replace("reports/latest", f"reports/{searched}")
        done["alone"] = _alone(place, alone, OFTEN if program.flaky else 1)
    return done


def _given(place: Place, command: str, most: int, wanted: str | None, *, until: bool) -> dict[str, Any]:
    """Until it does it, of what fails by chance; each time, of what should pass."""
    verdicts: list[str | None] = []
    while len(verdicts) < most and not (until and wanted in verdicts):
        verdicts.append(_verdict_of(place, command)[0])
    true = wanted in verdicts if until else set(verdicts) == {wanted}
    return {"command": command, "wanted": wanted, "verdicts": verdicts, "true": true}


def _verdict_of(place: Place, command: str) -> tuple[str | None, float]:
    """Of the run that it makes, and how long that took; None where it makes none."""
    before = place.newest()
    place.ran(command, COMMAND_S if "timeout" not in command else LIMIT_S)
    report = place.stored("report.json") if place.newest() != before else None
    if not report:
        return None, 0.0
    (outcome, *_) = report["outcomes"]
    return outcome["verdict"], outcome["timing"]["wall_s"]


def _alone(place: Place, command: str, most: int) -> dict[str, Any]:
    """It fails, or has no end."""
    codes: list[int | None] = []
    while len(codes) < most and (not codes or codes[-1] == 0):
        codes.append(place.ran(command, ALONE_S).code)
    return {"command": command, "wanted": "fails, or has no end", "codes": codes, "true": codes[-1] != 0}


def _slow_commands(place: Place, found: Mapping[str, str]) -> dict[str, Any]:
    if not (found["bad"] and found["good"]):
        return {}
    (bad, bad_s), (good, good_s) = (_verdict_of(place, found[one]) for one in ("bad", "good"))
    true = bad_s > good_s + 1.0  # two seconds of sleep in it
    return {
        "bad": {"command": found["bad"], "wanted": "slower", "verdicts": [bad], "seconds": bad_s, "true": true},
        "good": {
            "command": found["good"],
            "wanted": "PASS",
            "verdicts": [good],
            "seconds": good_s,
            "true": good == "PASS",
        },
    }


def judged(name: str, cell: Mapping[str, Any]) -> str:
    """Right, wrong, undecided, or none where there is no answer at all."""
    _, search = program_of(name)
    found = (cell["kind"], tuple(cell["items"]))
    if cell["kind"] is None or cell["code"] is None:
        return "none"
    if cell["kind"] == "undecided":
        return "right" if search.candidates and set(cell["open"]) == set(search.candidates) else "undecided"
    said_zones = tuple((how, value) for how, value in cell["zones"])
    return (
        "right" if found in search.right and (not said_zones or said_zones == (search.zones or said_zones)) else "wrong"
    )


def said(cell: Mapping[str, Any]) -> str:
    """The answer in a few words."""
    if cell["kind"] is None:
        return "no answer"
    items = cell["open"] if cell["kind"] == "undecided" else cell["items"]
    listed = ", ".join(str(one).removeprefix("run.env.") for one in items[:6]) + (" ..." if len(items) > 6 else "")
    return f"{cell['kind']} {'between ' if items and cell['kind'] == 'undecided' else ''}{listed}".strip()


BEGIN, END = "<!-- bisections -->", "<!-- end of bisections -->"


def page(known: Mapping[str, Any]) -> list[str]:
    """The section of docs/accuracy.md: a row a program, and each answer that is not right."""
    cells = {name: cell for name, cell in known["cells"].items() if name in names()}
    verdicts = [judged(name, cell) for name, cell in cells.items()]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("right", "undecided", "wrong", "none"))
    lines = [
        BEGIN,
        "## Bisections of known truth",
        "",
        "Programs whose truth is known (`tests/programs/bisected`), searched by the command as a person gives it, with",
        "limits as they are by default, on two cores. Each command that was printed was then given as it stands: how",
        "many did what they say is counted in the last column. `tools/bisections.py run` makes the cells anew.",
        "",
        f"{len(cells)} of {len(names())} searches run: {counts}.",
        "",
        "| program | what is varied | true | said | right | probes (floor) | seconds | commands |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
        *(_row(program, cells) for program in PROGRAMS),
        "",
        *_not_right(cells),
        END,
    ]
    return [line for number, line in enumerate(lines) if line or lines[number - 1]]


def _row(program: Program, cells: Mapping[str, Any]) -> str:
    mine = {f"{program.name}/{one.name}": cells.get(f"{program.name}/{one.name}") for one in program.searches}
    run = {name: cell for name, cell in mine.items() if cell}
    if not run:
        return f"| {program.name} | {program.what} | {program.true} | not run | | | | |"
    right = sum(judged(name, cell) == "right" for name, cell in run.items())
    answers = dict.fromkeys(said(cell) for cell in run.values())
    told = next(iter(answers)) if len(answers) == 1 else f"{right} as true" if right else "; ".join([*answers][:2])
    made = [one for cell in run.values() for one in cell["commands"].values()]
    floors = [cell["floor"] for cell in run.values() if cell["floor"] is not None]
    return (
        f"| {program.name} | {program.what} | {program.true} | {told} | {right} of {len(run)} |"
        f" {_spread([cell['probes'] for cell in run.values()])} ({_spread(floors)}) |"
        f" {_spread([cell['seconds'] for cell in run.values()])} | {sum(one['true'] for one in made)} of {len(made)} |"
    )


def _spread(numbers: Sequence[float]) -> str:
    """One, or the mean and the most."""
    if not numbers:
        return "-"
    return f"{numbers[0]:.0f}" if len(numbers) == 1 else f"{fmean(numbers):.0f}, at most {max(numbers):.0f}"


def _not_right(cells: Mapping[str, Any]) -> Iterator[str]:
    for name, cell in cells.items():
        verdict = judged(name, cell)
        if verdict != "right":
            sure = f", {cell['confidence']:.0%} sure" if verdict == "wrong" else ""
            yield f"- `{name}` is {verdict}: said {said(cell)}{sure}, exit {cell['code']}."
        for which, one in cell["commands"].items():
            if not one["true"]:
                yield f"- `{name}`, command `{which}`: wanted {one['wanted']}, did {_did(one)}: `{one['command']}`."


def _did(one: Mapping[str, Any]) -> str:
    done = [str(value) for value in one.get("verdicts", one.get("codes", []))]
    return ", ".join(f"{done.count(value)} x {value}" for value in dict.fromkeys(done))


def write_page() -> None:
    document = REPOSITORY / "docs" / "accuracy.md"
    text = document.read_text()
    if BEGIN in text:
        before, after = text[: text.index(BEGIN)], text[text.index(END) + len(END) + 1 :]
    else:
        at = text.index("## Our own corpus")
        before, after = text[:at], "\n" + text[at:]
    document.write_text(before + "\n".join(page(load(RESULTS))) + "\n" + after)


if __name__ == "__main__":
    main()
