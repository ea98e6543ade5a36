"""Programs that nobody here wrote, in rounds: sealed truths, one first run, and today's rules on the recordings.

A round is a folder of rounds/ with one folder a brief, each with programs and a truth.json. Programs run from a copy in
a folder whose name tells nothing. An answer is written once and never again; score.json is the score at first sight.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evaluation import blind
from evaluation.experiments import HOME, REPOSITORY, truths_of
from evaluation.launching import harness, scratch, without_paths
from evaluation.scoring import CERTAIN, PARTS, Answer, Row, Truth, compare, interval, mistakes, paragraph, shares
from nsa_harness.commands import misdiagnosis
from nsa_harness.commands.misdiagnosis import PROJECT, answer_values
from nsa_harness.render.documents.report_json import outcome_values

ROUNDS = HOME / "rounds"

FAMILIES = {family: frozenset(causes.split()) for family, causes in truths_of("families").items()}


def rounds() -> list[Path]:
    return sorted(path.parent for path in ROUNDS.glob("*/answers.jsonl"))


def seal(home: Path) -> str:
    """Store the hash of every program, and of every truth that stays hidden until the answers are given.

    Briefs may be added later. Nothing that is sealed may change.
    """
    sealed = ROUNDS / "sealed.json"
    known = json.loads(sealed.read_text()) if sealed.exists() else {}
    before = known.get(home.name, {})
    files = sorted(path for path in home.glob("*/**/*") if path.suffix in (".py", ".json"))
    now = {str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    changed = [name for name, digest in before.items() if now.get(name) != digest]
    if changed:
        raise SystemExit(f"sealed before, and not the same any more: {', '.join(changed)}")
    sealed.write_text(json.dumps({**known, home.name: now}, indent=1, sort_keys=True) + "\n")
    return f"{len(now)} files sealed, {len(now) - len(before)} of them new"


def truths(home: Path) -> list[dict[str, Any]]:
    """Every program of a round with its truth, its path below the round."""
    return [
        {**stored, "brief": path.parent.name, "program": f"{path.parent.name}/{stored['program']}"}
        for path in sorted(home.glob("*/truth.json"))
        for stored in json.loads(path.read_text())
    ]


def truth_of(stored: Mapping[str, Any]) -> Truth:
    """Return the truth as the scorer has it, with files relative to the program's folder."""
    families = {stored["family"], *stored["also"]}
    folder = Path(stored["program"]).parent
    return Truth(
        verdict=stored["verdict"],
        faulty=not stored["healthy"],
        # A cause may be named itself, instead of its family.
        causes=frozenset().union(*(FAMILIES.get(family, {family}) for family in families if family)),
        ranks=frozenset(tuple(sorted(ranks)) for ranks in stored["guilty"]),
        places=tuple(
            (os.path.relpath(Path(stored["brief"]) / line["file"], folder), line["from"], line["to"])
            for line in stored["lines"]
        ),
    )


def run(home: Path, out: Path, jobs: int) -> Iterator[str]:
    """Run every program of a round that has no answer yet, and store answers and recordings."""
    file = home / "answers.jsonl"
    done = answers_in(home) if file.exists() else {}

    def answer(stored: dict[str, Any]) -> dict[str, Any]:
        outcome, folder, evidence = _outcome(home, stored, out / stored["program"].replace("/", "__"))
        places = ((str(folder), PROJECT), (str(folder.parent), "/home/ada"), (str(REPOSITORY), "/home/ada/nsa-harness"))
        recorded = json.dumps(json.loads(misdiagnosis.without_paths(evidence, places)))
        with gzip.open(home / "evidence.jsonl.gz", "at") as recordings:
            recordings.write(f'{{"program": "{stored["program"]}", "evidence": {recorded}}}\n')
        summary = without_paths(outcome["summary"], folder)
        return {"program": stored["program"], **answer_values(outcome, str(folder)), "summary": summary}

    with ThreadPoolExecutor(jobs) as pool, file.open("a") as lines:
        for answered in pool.map(answer, (stored for stored in truths(home) if stored["program"] not in done)):
            lines.write(json.dumps(answered, sort_keys=True) + "\n")
            lines.flush()
            yield f"{answered['program']} {answered['verdict']} {answered['cause']}"


def _outcome(home: Path, stored: Mapping[str, Any], reports: Path) -> tuple[dict[str, Any], Path, str]:
    """Return what the harness says of a program, the folder it ran in, and its evidence."""
    program = home / stored["program"]
    with scratch(program.parent) as place:
        command = [
            harness(), "run", "--script", program.name, f"--ranks={stored['ranks']}", f"--out={reports.resolve()}",
            "limits.deadline_s=420", "--", *stored["args"],
        ]  # fmt: skip
        place.ran(command, 900, OMP_NUM_THREADS="1")
        report = json.loads(next(reports.glob("*/report.json")).read_text())
        outcome = next(outcome for outcome in report["outcomes"] if outcome["final"])
        return outcome, place.folder, next(reports.glob("*/*/evidence/*.json")).read_text()


def healthy(out: Path, runs: int, jobs: int) -> Iterator[str]:
    """Run the healthy programs of all rounds in turn until so many runs are done at so many at once.

    It goes on where it was stopped. Jobs beyond the cores are the load.
    """
    file = ROUNDS / "healthy.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    counts = known.setdefault(f"{jobs} at once on {os.cpu_count()} cores", {"runs": 0, "said against": []})
    programs = [(home, stored) for home in rounds() for stored in truths(home) if stored["healthy"]]

    def once(number: int) -> tuple[str, dict[str, Any]]:
        home, stored = programs[number % len(programs)]
        reports = out / f"{jobs}" / f"{number}"
        outcome = _outcome(home, stored, reports)[0]
        shutil.rmtree(reports)
        return f"{home.name}/{stored['program']}", outcome

    with ThreadPoolExecutor(jobs) as pool:
        for program, outcome in pool.map(once, range(counts["runs"], runs)):
            counts["runs"] += 1
            codes = [finding["code"] for finding in outcome["findings"] or []]
            if outcome["verdict"] != "PASS" or codes:
                counts["said against"].append({"program": program, "verdict": outcome["verdict"], "findings": codes})
            file.write_text(json.dumps(known, indent=1) + "\n")
            yield " ".join([str(counts["runs"]), program, outcome["verdict"], *codes])


def answers_in(home: Path) -> dict[str, dict[str, Any]]:
    """What was said of each program when it was first seen."""
    return {answer["program"]: answer for answer in map(json.loads, (home / "answers.jsonl").read_text().splitlines())}


def answers_of_today(home: Path) -> dict[str, dict[str, Any]]:
    """What the rules of this commit say of each recording, with the program's source if the recording has none."""
    return {
        program: answer_values(outcome_values(blind.judge_again(blind.collected(evidence, texts))), PROJECT)
        for program, evidence, texts in blind.recordings(home)
    }


def judged(stored: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """One row of a score: what is right of an answer, and whether it is certain, and wrong all the same."""
    truth = truth_of(stored)
    right = compare(truth, answer)
    certain = truth.faulty and not truth.silent and (answer["confidence"] or 0) >= CERTAIN
    return {
        "program": stored["program"],
        "faulty": truth.faulty,
        "said": answer["verdict"],
        **right,
        "certain": certain,
        "wrong": certain and (right["rank"] is False or right["cause"] is False),
    }


def figures(rows: list[dict[str, Any]]) -> Row:
    """The figures of a round, in the order and words of score.json."""
    sure = [row for row in rows if row["certain"]]
    wrong = sum(row["wrong"] for row in sure)
    false = [row for row in rows if not row["faulty"] and row["said"] == "HANG"]
    return {
        **shares(rows),
        "certain": f"{len(sure)} of {sum(row['faulty'] for row in rows)}",
        "certain and wrong": f"{wrong} of {len(sure)} (95 % interval {interval(wrong, len(sure))})",
        "false HANG": f"{len(false)} of {sum(not row['faulty'] for row in rows)}",
    }


def rows_of(home: Path, answers: Mapping[str, Answer]) -> list[dict[str, Any]]:
    return [judged(stored, answers[stored["program"]]) for stored in truths(home) if stored["program"] in answers]


def score(home: Path) -> str:
    """Return the figures at first sight with each program that was missed, and write them to score.json."""
    rows = rows_of(home, answers_in(home))
    counts = figures(rows)
    (home / "score.json").write_text(json.dumps({"figures": counts, "rows": rows}, indent=1) + "\n")
    missed = [f"  {row['program']}: {', '.join(mistakes(row))}" for row in rows if mistakes(row)]
    return "\n".join([*(f"{name:18} {text}" for name, text in counts.items()), "missed:", *missed])


def short(answer: Answer) -> str:
    place = f"{answer['file']}:{answer['line']}" if answer["line"] else ""
    ranks = f"ranks {answer['ranks']}" if answer["ranks"] else ""
    return " · ".join(part for part in (answer["verdict"], answer["cause"], ranks, place) if part)


def replay(file: Path) -> Iterator[str]:
    """Yield for each recording what was said, what today's rules say, and what of that is true.

    `file`: as `nsa-harness wrong` wrote it, or the folder that it was unpacked to.
    """
    with tempfile.TemporaryDirectory() as folder:
        home = _unpacked(file, Path(folder))
        before, now = answers_in(home), answers_of_today(home)
        for stored in truths(home):
            program = stored["program"]
            row = judged(stored, now[program])
            yield f"{program}: {stored['why']}".rstrip(": ")
            yield from (
                f"  {when:6}{short(answer)}" for when, answer in (("then", before[program]), ("today", now[program]))
            )
            right = ", ".join(part for part in PARTS if row[part] is True)
            yield f"  right {right or 'nothing'}; wrong {', '.join(mistakes(row)) or 'nothing'}"


def _unpacked(file: Path, folder: Path) -> Path:
    """Return the folder of a recording. Nothing in it may lead out of it."""
    if file.is_dir():
        return file
    with tarfile.open(file) as packed:
        # A Python 3.11 before 3.11.4 has no filters.
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(folder, [member for member in packed if _stays_inside(member)], **safely)
    (home,) = folder.iterdir()
    return home


def _stays_inside(member: tarfile.TarInfo) -> bool:
    path = Path(member.name)
    return (member.isfile() or member.isdir()) and not path.is_absolute() and ".." not in path.parts


# Row labels of accuracy.md for the figures in score.json.
FIGURE_LABELS = {
    "verdict": "the verdict (PASS, FAIL or HANG) is right",
    "false HANG": "healthy programs reported as HANG",
    "rank": "exactly the ranks at fault are named",
    "cause": "the cause is right",
    "line": "the line is at most two lines away from a line that fixes the bug",
    "silent": "the run passes despite its bug, and a finding names the bug",
    "certain": "the cause is called certain",
    "certain and wrong": "the cause is called certain, but the cause or the ranks are wrong",
}


def section() -> list[str]:
    """Return the section of accuracy.md with the figures of every round at its first and only scored run."""
    scored = [json.loads(file.read_text()) for file in sorted(ROUNDS.glob("*/score.json"))]
    heads = [f"round {number} ({len(score['rows'])} programs)" for number, score in enumerate(scored, 1)]
    return [
        "## Programs by independent authors",
        "",
        *paragraph(
            """
            The authors of these training programs knew neither the rules of nsa-harness nor its test programs. Half
            of the programs contain an ordinary bug, and the others are the same programs without it. The expected
            verdict, the ranks at fault, the cause, and the lines to change were sealed before the first run
            (`evaluation/rounds/sealed.json`). Each round was run and scored once, before any rule was changed because
            of it.
            """
        ),
        "",
        f"| part of the answer | {' | '.join(heads)} |",
        f"| --- |{' ---: |' * len(scored)}",
        *(
            f"| {label} | {' | '.join(score['figures'].get(name, '-') for score in scored)} |"
            for name, label in FIGURE_LABELS.items()
        ),
        "",
        *paragraph(
            """
            Ranks, cause and line are counted only if the bug makes the run fail or hang, and if the sealed answer
            names them.
            """
        ),
        "",
    ]
