"""Bisections of programs whose truth is known: what is said of each, what it took, and whether its commands say so too.

The programs lie in programs/bisected and know nothing of the harness. A case is one search, named PROGRAM/SEARCH;
truth/bisections.toml says what is right.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from evaluation.experiments import PROGRAMS as FOLDERS
from evaluation.experiments import Cell, Experiment, Results, digest_of, truths_of
from evaluation.launching import Place, scratch, without_paths
from evaluation.scoring import Row, paragraph

HOME = FOLDERS / "bisected"
COMMAND_S = 120  # limit of a printed command
ALONE_S = 30  # limit of the command without the harness: a job that hangs has no end of its own
OFTEN = 25  # runs in which a failure that shows in a fifth of them is missed once in 260 times
VERDICTS = ("right", "undecided", "wrong", "none")

RightAnswer = tuple[str, tuple[Any, ...]]  # kind and items, as bisect.json has them


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search of a program, and what is right to say of it."""

    name: str
    words: tuple[str, ...]
    right: tuple[RightAnswer, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a stranger asks about it."""

    name: str
    what: str
    true: str  # for people
    searches: tuple[Search, ...]
    between: tuple[Any, ...] = ()  # right as well: undecided between just these
    zones: tuple[tuple[str, Any], ...] = ()  # each with its first value; asked for where some are said
    limit_s: float = 600
    flaky: bool = False  # a command may have to be given several times
    slow: bool = False  # its commands differ in time alone
    commits: bool = False  # it is made, commit by commit


def read(name: str, stored: Mapping[str, Any]) -> Program:
    """Return a program as the table of truths has it, with all of its searches."""
    known = dict(stored)
    words, right = known.pop("words"), tuple((kind, tuple(items)) for kind, items in known.pop("right", []))
    times, layers = known.pop("times", 0), known.pop("every_range_of", 0)
    first, last = known.pop("between_all", (0, -1))
    between = (*known.pop("between", ()), *range(first, last + 1))
    zones = tuple(map(tuple, known.pop("zones", ())))
    names = [f"search {number}" for number in range(1, times + 1)] or ["search"]
    searches = [Search(name=search, words=tuple(shlex.split(words)), right=right) for search in names]
    if layers:
        searches = [_range(words, *edges) for edges in combinations(range(layers + 1), 2)]
    return Program(name=name, searches=tuple(searches), between=between, zones=zones, **known)


def _range(words: str, start: int, stop: int) -> Search:
    name = f"{start}:{stop}"
    alone: tuple[RightAnswer, ...] = (("single", (start,)),) if stop - start == 1 else ()
    searched = tuple(shlex.split(words.replace("{start}:{stop}", name)))
    return Search(name=name, words=searched, right=(*alone, ("range", (start, stop))))


PROGRAMS = {name: read(name, stored) for name, stored in truths_of("bisections").items()}


def parts_of(case: str) -> tuple[Program, Search]:
    first, _, last = case.partition("/")
    program = PROGRAMS[first]
    return program, next(search for search in program.searches if search.name == last)


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


def digest(program: Program) -> str:
    """A digest of what is searched and how."""
    files = [HOME / word for word in program.searches[0].words[:1] if (HOME / word).is_file()]
    files += [HOME / f"{program.name}.py"] if not files or files[0].suffix != ".py" else []
    texts = [path.read_text() for path in files if path.is_file()]
    made = [commits.__code__.co_code.hex()] if program.commits else []
    return digest_of((texts, made, [search.words for search in program.searches]))


_RUN = re.compile(r"2\d{7}T\d{6}-[0-9a-f]{4}")


def launch(case: str) -> dict[str, Any]:
    """Search one program, and give each command that was printed."""
    program, search = parts_of(case)
    with scratch(None if program.commits else HOME) as place:
        if program.commits:
            commits(place.folder)
        command = " ".join(["nsa-harness", "bisect", *(_quoted(word) for word in search.words)])
        ran = place.ran(command, program.limit_s, COLUMNS="120")
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


def _quoted(word: str) -> str:
    return word if re.fullmatch(r"[\w./=:~,-]+", word) else "'" + word + "'"


def answer_in(place: Place, program: Program) -> dict[str, Any]:
    """Return what bisect.json says, in words that stay the same from one run to the next."""
    stored = place.stored("bisect.json")
    if stored is None:
        return {"kind": None, "items": [], "open": [], "zones": [], "confidence": None, "probes": 0, "floor": None}
    answer, detail = stored["answer"], stored["detail"]
    subject = detail["subject"]
    labels = [_label(place, program, item) for item in subject["items"]]

    def spans(found: Iterable[Sequence[int]]) -> list[Any]:
        return [labels[number] for start, stop in found for number in range(start, stop)]

    def first(length: int) -> Any:
        return _label(place, program, subject["good"]) if length == 0 else labels[length - 1]

    return {
        "kind": answer["kind"],
        "items": [_label(place, program, item) for item in answer["items"]],
        "open": spans(detail["answer"]["open"]),
        "zones": [[zone["counts_as"], first(zone["start"])] for zone in detail["answer"].get("zones") or []],
        "confidence": detail["answer"]["confidence"],
        "sought": (stored["outcome_sought"] or {}).get("verdict"),
        "probes": len(stored["probes"]),
        "floor": stored["floor_probes"],
    }


def _label(place: Place, program: Program, item: Any) -> Any:
    """A commit by its subject, since its number is another one each time."""
    return git(place.folder, "log", "-1", "--format=%s", str(item)) if program.commits else item


def commands_of(place: Place, program: Program) -> dict[str, Any]:
    """Give each command that was printed, and return whether it does what it was printed for."""
    stored = place.stored("bisect.json")
    if stored is None:
        return {}
    printed = stored["commands"]
    if program.slow:
        return _slow_commands(place, printed)
    sought = (stored["outcome_sought"] or {}).get("verdict")
    searched = place.newest()
    done: dict[str, Any] = {}
    if printed["bad"]:
        done["bad"] = _given(place, printed["bad"], OFTEN if program.flaky else 1, sought, until=True)
    if printed["good"]:
        done["good"] = _given(place, printed["good"], 5 if program.flaky else 1, "PASS", until=False)
    if printed["alone"]:
        alone = printed["alone"].replace("reports/latest", f"reports/{searched}")
        done["alone"] = _alone(place, alone, OFTEN if program.flaky else 1)
    return done


def _given(place: Place, command: str, most: int, wanted: str | None, *, until: bool) -> dict[str, Any]:
    """Give a command until it does what is wanted, if it fails by chance; if it should pass, each time."""
    verdicts: list[str | None] = []
    while len(verdicts) < most and not (until and wanted in verdicts):
        verdicts.append(_verdict_of(place, command)[0])
    true = wanted in verdicts if until else set(verdicts) == {wanted}
    return {"command": command, "wanted": wanted, "verdicts": verdicts, "true": true}


def _verdict_of(place: Place, command: str) -> tuple[str | None, float]:
    """Return the verdict of the run that a command makes, and its seconds; None if it makes no run."""
    before = place.newest()
    place.ran(command, COMMAND_S if "timeout" not in command else Program.limit_s)
    report = place.stored("report.json") if place.newest() != before else None
    if not report:
        return None, 0.0
    (outcome, *_) = report["outcomes"]
    return outcome["verdict"], outcome["timing"]["wall_s"]


def _alone(place: Place, command: str, most: int) -> dict[str, Any]:
    """Give the command without the harness until it fails, or has no end."""
    codes: list[int | None] = []
    while len(codes) < most and (not codes or codes[-1] == 0):
        codes.append(place.ran(command, ALONE_S).code)
    return {"command": command, "wanted": "fails, or has no end", "codes": codes, "true": codes[-1] != 0}


def _slow_commands(place: Place, printed: Mapping[str, str]) -> dict[str, Any]:
    if not (printed["bad"] and printed["good"]):
        return {}
    (bad, bad_s), (good, good_s) = (_verdict_of(place, printed[which]) for which in ("bad", "good"))
    slower = bad_s > good_s + 1.0  # two seconds of sleep in it
    checks = (("bad", "slower", bad, bad_s, slower), ("good", "PASS", good, good_s, good == "PASS"))
    return {
        which: {"command": printed[which], "wanted": wanted, "verdicts": [verdict], "seconds": took_s, "true": true}
        for which, wanted, verdict, took_s, true in checks
    }


def judged(case: str, cell: Cell) -> str:
    """Return right, wrong, undecided, or none where there is no answer at all."""
    program, search = parts_of(case)
    if cell["kind"] is None or cell["code"] is None:
        return "none"
    if cell["kind"] == "undecided":
        return "right" if program.between and set(cell["open"]) == set(program.between) else "undecided"
    zones = tuple((how, value) for how, value in cell["zones"])
    named = (cell["kind"], tuple(cell["items"])) in search.right
    return "right" if named and (not zones or zones == (program.zones or zones)) else "wrong"


def said(cell: Cell) -> str:
    """The answer in a few words."""
    if cell["kind"] is None:
        return "no answer"
    items = cell["open"] if cell["kind"] == "undecided" else cell["items"]
    listed = ", ".join(str(item).removeprefix("run.env.") for item in items[:6]) + (" ..." if len(items) > 6 else "")
    return f"{cell['kind']} {'between ' if items and cell['kind'] == 'undecided' else ''}{listed}".strip()


def describe(case: str, cell: Cell) -> str:
    return f"{judged(case, cell):10} {said(cell)}   {cell['seconds']:.0f} s"


def _known(results: Results) -> dict[str, Any]:
    return {case: cell for case, cell in results["cells"].items() if case in EXPERIMENT.cases}


def rows(results: Results) -> dict[str, Row]:
    verdicts = Counter(judged(case, cell) for case, cell in _known(results).items())
    return {"bisections": {"cases": str(verdicts.total()), "answer": f"{verdicts['right']} of {verdicts.total()}"}}


EXPERIMENT = Experiment(
    name="bisections",
    cases=tuple(f"{program.name}/{search.name}" for program in PROGRAMS.values() for search in program.searches),
    launch=launch,
    describe=describe,
    rows=rows,
    fingerprint=lambda case: {"program": digest(parts_of(case)[0])},
)


def section(results: Results) -> list[str]:
    """Return the section of accuracy.md: a row per program, and each answer that is not right."""
    cells = _known(results)
    verdicts = [judged(case, cell) for case, cell in cells.items()]
    lines = [
        "<!-- bisections -->",
        "## Bisections with a known answer",
        "",
        *paragraph(
            """
            `nsa-harness bisect` searched programs with a known answer (`evaluation/programs/bisected`), with default
            limits, on two cores. The commands that each search printed as proof were then run unchanged. The last
            column counts how many of them ended as printed. `python -m evaluation run bisections` repeats the
            searches.
            """
        ),
        "",
        f"{len(cells)} of {len(EXPERIMENT.cases)} searches run:"
        f" {', '.join(f'{verdicts.count(word)} {word}' for word in VERDICTS)}.",
        "",
        "| program | what is varied | right answer | answer | right | probes (minimum) | seconds | commands |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
        *(_row(program, cells) for program in PROGRAMS.values()),
        "",
        *_not_right(cells),
        "<!-- end of bisections -->",
        "",
    ]
    return [line for number, line in enumerate(lines) if line or lines[number - 1]]


def _row(program: Program, cells: Mapping[str, Cell]) -> str:
    names = [f"{program.name}/{search.name}" for search in program.searches]
    run = {case: cells[case] for case in names if case in cells}
    if not run:
        return f"| {program.name} | {program.what} | {program.true} | not run | | | | |"
    right = sum(judged(case, cell) == "right" for case, cell in run.items())
    answers = dict.fromkeys(said(cell) for cell in run.values())
    answer = next(iter(answers)) if len(answers) == 1 else f"{right} right" if right else "; ".join([*answers][:2])
    commands = [command["true"] for cell in run.values() for command in cell["commands"].values()]
    probes, seconds = ([cell[key] for cell in run.values()] for key in ("probes", "seconds"))
    floors = [cell["floor"] for cell in run.values() if cell["floor"] is not None]
    return (
        f"| {program.name} | {program.what} | {program.true} | {answer} | {right} of {len(run)} |"
        f" {_spread(probes)} ({_spread(floors)}) | {_spread(seconds)} | {sum(commands)} of {len(commands)} |"
    )


def _spread(numbers: Sequence[float]) -> str:
    """The number, or the mean and the most of several."""
    if not numbers:
        return "-"
    return f"{numbers[0]:.0f}" if len(numbers) == 1 else f"{fmean(numbers):.0f}, at most {max(numbers):.0f}"


def _not_right(cells: Mapping[str, Cell]) -> Iterator[str]:
    for case, cell in cells.items():
        verdict = judged(case, cell)
        if verdict != "right":
            sure = f", {cell['confidence']:.0%} sure" if verdict == "wrong" else ""
            yield f"- `{case}` is {verdict}: answer {said(cell)}{sure}, exit code {cell['code']}."
        for which, command in cell["commands"].items():
            if not command["true"]:
                counts = Counter(map(str, command.get("verdicts", command.get("codes", []))))
                did = ", ".join(f"{count} x {ending}" for ending, count in counts.items())
                wanted = command["wanted"]
                yield f"- `{case}`, command `{which}`: expected {wanted}, got {did}: `{command['command']}`."
