"""Run each program of a round once, run `nsa-harness why` on the faulty ones, and score both answers.

Each program runs from a copy in a folder whose name tells nothing. An answer is stored once in why.jsonl of the round,
with the Python version of the ranks. Rows of rounds 5 to 10 have no answer of the first run, except its line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evaluation.launching import Place, Ran, harness, scratch
from evaluation.scoring import LINES_OFF, Truth, compare, interval, paragraph, share
from evaluation.strangers import ROUNDS, truth_of, truths
from nsa_harness.commands.misdiagnosis import answer_values

FILE = "why.jsonl"
HEALTHY_FILE = "why_healthy.jsonl"
LIMIT_S = 900
FIRST_THREE = 3
# Writes the sum of each tensor that backward starts from, bit for bit. It is a library for the recorder.
LOSSES = """
import os
import torch
backward = torch.autograd.backward
def noted(tensors, *more, **named):
    with open(f"{os.environ['LOSSES']}.{os.environ.get('RANK')}", "a") as file:
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            file.write(float(tensor.detach().double().sum()).hex() + "\\n")
    return backward(tensors, *more, **named)
torch.autograd.backward = noted
"""
RECORD = """
import sys
from dataclasses import replace
from nsa_harness.commands.api import plan, run_one
from nsa_harness.core.experiment.diagnostic_rerun import RECORDED
out, script, ranks, python, *args = sys.argv[1:]
(spec,) = plan("limits.deadline_s=600", script=script, ranks=int(ranks), args=args)
run_one(replace(spec, env=(*spec.env, *RECORDED.env), python=python or spec.python), out=out)
"""
# Row labels of accuracy.md.
LABELS = {
    "verdict": "the verdict of the first run is right",
    "false HANG": "a healthy program is called a HANG",
    "rank": "the culprit rank of the first run is right",
    "cause": "the cause of the first run is right",
    "run": "the line of the first run is right",
    "first": "the first line that `why` names is right",
    "first three": "one of the first three lines is right",
    "certain": "an experiment proved the line",
    "certain and wrong": "an experiment proved a line that is wrong",
    "silent": "one of the first three lines is right, of programs that train wrongly but end well",
}
ANSWER = ("verdict", "cause", "ranks", "file", "line", "confidence", "beside")
_NOTHING_EXPLAINED: dict[str, Any] = {"division": None, "candidates": [], "notes": []}
_ALWAYS = ("certain and wrong",)  # labels shown although no program counts
FIRST_RUN = ("verdict", "rank", "cause")


def run(home: Path, out: Path, jobs: int, python: str | None) -> Iterator[str]:
    """Run every program of a round that has no answer of this Python version yet, and explain the faulty ones."""
    file = home / FILE
    version = _version(python)
    done = {row["program"] for row in rows_in(home) if row["python"] == version}

    def explained(stored: dict[str, Any]) -> dict[str, Any]:
        reports = out / version / stored["program"].replace("/", "__")
        return {"program": stored["program"], "python": version, **_explained(home, stored, reports, python)}

    with ThreadPoolExecutor(jobs) as pool, file.open("a") as lines:
        for row in pool.map(explained, (stored for stored in truths(home) if stored["program"] not in done)):
            lines.write(json.dumps(row, sort_keys=True) + "\n")
            lines.flush()
            yield f"{row['program']} {row['verdict']} {row['result']} {row['run']} {row['candidates'][:FIRST_THREE]}"


def _explained(home: Path, stored: Mapping[str, Any], reports: Path, python: str | None) -> dict[str, Any]:
    """Return the answer of a first run, and what `why` says of this run if the program has a fault."""
    program = home / stored["program"]
    interpreter = [f"--python={python}"] if python else []
    with scratch(program.parent) as place:
        command = [
            harness(), "run", "--script", program.name, f"--ranks={stored['ranks']}", f"--out={reports.resolve()}",
            *interpreter, "limits.deadline_s=420", "--", *stored["args"],
        ]  # fmt: skip
        first = place.ran(command, LIMIT_S, OMP_NUM_THREADS="1")
        report = _only(reports.resolve(), "*/report.json")
        outcome = next(outcome for outcome in report["outcomes"] if outcome["final"])
        line = (outcome["culprit"] or {}).get("place")
        answer = {name: value for name, value in answer_values(outcome, str(place.folder)).items() if name in ANSWER}
        row = {
            "verdict": outcome["verdict"], "run": _line(line, place), "run_s": round(first.seconds, 1), "answer": answer
        }  # fmt: skip
        if stored["healthy"] or (outcome["verdict"] == "PASS" and stored["verdict"] != "PASS"):
            result = "healthy" if stored["healthy"] else "not failed"
            return row | {"result": result, "candidates": [], "certain": False, "runs": 0, "why_s": 0.0}
        run_directory = next(reports.resolve().glob("*/report.json")).parent
        answers = reports.resolve().with_name(reports.name + "__why")
        ran = place.ran([harness(), "why", str(run_directory), f"--out={answers}"], LIMIT_S, OMP_NUM_THREADS="1")
        if not list(answers.glob("*/why.json")):  # `why` has nothing to explain in a run that passed
            return row | {"result": "refused", "candidates": [], "certain": False, "runs": 0, "why_s": 0.0}
        return row | _answer(answers, place) | {"why_s": round(ran.seconds, 1)}


def run_healthy(home: Path, out: Path, most: int, python: str | None) -> Iterator[str]:
    """Record healthy programs of a round, and compare each with a run without nsa-harness. Goes on where it stopped.

    `most`: so many programs of the round at most, from all of its briefs.
    """
    file = home / HEALTHY_FILE
    version = _version(python)
    done = {row["program"] for row in rows_in(home, HEALTHY_FILE) if row["python"] == version}
    programs = [one for one in truths(home) if one["healthy"]]
    for stored in programs[:: max(1, len(programs) // most)][:most]:
        if stored["program"] not in done:
            reports = out / version / "healthy" / stored["program"].replace("/", "__")
            row = {"program": stored["program"], "python": version, **_recorded(home, stored, reports, python)}
            with file.open("a") as lines:
                lines.write(json.dumps(row, sort_keys=True) + "\n")
            yield f"{row['program']} {'as without' if is_as_without(row) else row}"


def _recorded(home: Path, stored: Mapping[str, Any], reports: Path, python: str | None) -> dict[str, Any]:
    """Return how a recorded run of a healthy program differs from a run without nsa-harness, and what is said of it.

    If the losses differ, the program runs without nsa-harness once more, which shows whether they always do.
    """
    folder, name = home / Path(stored["program"]).parent, Path(stored["program"]).name
    launcher = [python or sys.executable, "-m", "torch.distributed.run", "--standalone"]
    plain = [*launcher, f"--nproc-per-node={stored['ranks']}", name, *stored["args"]]
    with scratch(folder) as place:
        first, losses = _with_losses(place, plain)
    with scratch(folder) as place:
        words = [str(reports.resolve()), name, str(stored["ranks"]), python or "", *stored["args"]]
        ran, recorded = _with_losses(place, [sys.executable, "-c", RECORD, *words])
        outcome = _only(reports, "*/report.json")["outcomes"][0]
        # A run that passes has an explanation only if replicas of its model differ.
        explained = list(reports.glob("*/*/explanation.json"))
        explanation = json.loads(explained[0].read_text()) if explained else _NOTHING_EXPLAINED
        division = explanation["division"] and _line(explanation["division"]["place"], place)
        candidates = [[*_line(one["place"], place), one["kind"]] for one in explanation["candidates"]]
    same: bool | None = recorded == losses
    if not same:
        with scratch(folder) as place:
            same = None if _with_losses(place, plain)[1] != losses else False
    return {
        "exit": first.code,
        "verdict": outcome["verdict"],
        "findings": [finding["code"] for finding in outcome["findings"] or []],
        "division": division,
        "candidates": candidates,
        "notes": explanation["notes"],
        "trouble": [f"{one['what']}: {one['why']}" for one in outcome["trouble"]],
        "losses": sum(text.count("\n") for text in recorded.values()),
        "same losses": same,  # None: two runs without nsa-harness differ as well
        "plain_s": round(first.seconds, 1),
        "recorded_s": round(ran.seconds, 1),
    }


def _with_losses(place: Place, command: Sequence[str]) -> tuple[Ran, dict[str, str]]:
    """Run a command, and return the losses of each rank, bit for bit."""
    library = place.folder.parent / "site-packages"
    library.mkdir()
    (library / "sitecustomize.py").write_text(LOSSES)
    losses = place.folder.parent / "losses"
    ran = place.ran(command, LIMIT_S, OMP_NUM_THREADS="1", PYTHONPATH=str(library), LOSSES=str(losses))
    return ran, {path.suffix: path.read_text() for path in sorted(losses.parent.glob("losses.*"))}


def is_as_without(row: Mapping[str, Any]) -> bool:
    """Return whether a recorded run of a healthy program ended as one without nsa-harness, and nothing was named."""
    return row["exit"] == 0 and row["verdict"] == "PASS" and row["same losses"] is not False and not row["division"]


def _answer(answers: Path, place: Place) -> dict[str, Any]:
    """Return the lines that `why` names, the one that it shows as the origin first."""
    why = _only(answers, "*/why.json")
    candidates = (why["explanation"] or {}).get("candidates", [])
    order = [index for index in range(len(candidates)) if index != why["origin"] and index not in why["dropped"]]
    order = ([] if why["origin"] is None else [why["origin"]]) + order
    named = [[*_line(candidates[index]["place"], place), candidates[index]["kind"]] for index in order]
    if why["result"] == "first_line" or not named:  # the answer is the line of the first run
        named = [[*_line(why["first"]["place"], place), "first run"], *named]
    return {
        "result": why["result"],
        "candidates": named,
        "certain": why["result"] == "certain",
        "runs": len(why["runs"]),
        "experiments": [[one["experiment"], one["proof"]] for one in why["runs"] if one["experiment"]],
        "claim": why["claim"].replace(str(place.folder), "project"),
    }


def _only(folder: Path, pattern: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(next(folder.glob(pattern)).read_text())
    return answer


def _line(line: Mapping[str, Any] | None, place: Place) -> list[Any]:
    """Return the file, relative to the folder of the program, and the line."""
    if not line or not line.get("file"):
        return ["", 0]
    return [os.path.relpath(line["file"], place.folder), line["line"]]


def _version(python: str | None) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run(
        [python or sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def rows_in(home: Path, name: str = FILE) -> list[dict[str, Any]]:
    file = home / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _hits(truth: Truth, lines: Sequence[Sequence[Any]]) -> bool:
    return any(
        line[0] == file and first - LINES_OFF <= line[1] <= last + LINES_OFF
        for line in lines
        for file, first, last in truth.places
    )


def judged(stored: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is right of an answer. None: the truth or the row has nothing to compare."""
    truth = truth_of(stored)
    first = row.get("answer")
    right = compare(truth, first) if first else {}
    three = _hits(truth, row["candidates"][:FIRST_THREE])
    lines: dict[str, bool | None] = {
        "run": _hits(truth, [row["run"]]),
        "first": _hits(truth, row["candidates"][:1]),
        "first three": three,
        "certain": row["certain"],
        "certain and wrong": row["certain"] and not _hits(truth, row["candidates"][:1]),
    }
    asks_lines = bool(truth.places) and not truth.silent
    return {
        "program": stored["program"],
        **{part: right.get(part) for part in FIRST_RUN},
        "false HANG": row["verdict"] == "HANG" if stored["healthy"] else None,
        **(lines if asks_lines else dict.fromkeys(lines)),
        "silent": three if truth.silent and truth.places else None,
    }


def figures(home: Path) -> dict[str, dict[str, str]]:
    """Return the figures of a round, for each Python version."""
    known = {stored["program"]: stored for stored in truths(home)}
    by_version: dict[str, list[dict[str, Any]]] = {}
    for row in rows_in(home):
        by_version.setdefault(row["python"], []).append(judged(known[row["program"]], row))
    return {version: _figures(rows) for version, rows in sorted(by_version.items())}


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    counts = {label: share(row[label] for row in rows) for label in LABELS}
    sure = Counter(row["certain and wrong"] for row in rows if row["certain"])
    wrong = f"{sure[True]} of {sure.total()} (95 % interval {interval(sure[True], sure.total())})"
    counts["certain and wrong"] = wrong if sure else "0 of 0"
    return {label: "-" if count == "0 of 0" and label not in _ALWAYS else count for label, count in counts.items()}


def report(home: Path) -> str:
    """Return the figures of a round, and each program whose lines are all wrong."""
    known = {stored["program"]: stored for stored in truths(home)}
    texts = [
        f"{version:5} {label:18} {count}"
        for version, counts in figures(home).items()
        for label, count in counts.items()
    ]
    for row in rows_in(home):
        stored = known[row["program"]]
        right = judged(stored, row)
        if right["first three"] is False or right["silent"] is False:
            texts.append(
                f"missed by {row['python']}: {row['program']} {row['result']} {row['candidates'][:FIRST_THREE]}"
            )
        wrong = [part for part in FIRST_RUN if right[part] is False]
        if wrong:
            texts.append(f"first run wrong in {', '.join(wrong)}: {row['program']} {row['answer']}")
    return "\n".join(texts)


def section() -> list[str]:
    """Return the section of accuracy.md about `nsa-harness why`."""
    columns = [
        (f"{home.name}, Python {version}", counts)
        for home in sorted(
            (path.parent for path in ROUNDS.glob(f"*/{FILE}")), key=lambda home: (len(home.name), home.name)
        )
        for version, counts in figures(home).items()
    ]
    if not columns:
        return []
    shown = {name: label for name, label in LABELS.items() if any(counts[name] != "-" for _, counts in columns)}
    return [
        "## Lines that `nsa-harness why` names",
        "",
        *paragraph(
            """
            `nsa-harness why` ran once for each program that the table counts, after the run that failed. Three failing
            programs of round 5 and three of round 6 have not been run yet. A line is right if it is at most two lines
            away from a line that fixes the bug. The programs were not known when the rules of `why` were written. After
            the first five programs of round 5, the rule that says which experiment proves an origin was made stricter,
            because two of its three proofs were wrong. Rounds 7 and 8 ran after the ranking of the candidates had been
            fitted to rounds 1 to 6, and rounds 9 and 10 after the candidates and the experiments had been extended with
            rounds 5 to 8 in view. With the recordings of rounds 5 to 8, the extended rules name the right line first in
            35 of 50 programs, which says nothing about new programs. Both wrong proofs of rounds 9 and 10 have since
            become impossible. Rounds 11 and 12 have 50 programs each, which all ran once; in half of the programs with
            a fault, the fix is far from the wait. The three wrong proofs of round 12 (a number that counts the
            parameters of a rank, the name of a rank's own file, and the length of a list that a function of the program
            returns) are no proofs of an origin any more. Rounds 13 and 14 have 26 programs each. They ran after the
            ranking had been extended with rounds 9 to 12 in view. Afterwards, two rules were added in view of their
            recordings: data that were dealt out by rank and then filtered, and loops over the result of a function.
            """
        ),
        "",
        f"| part of the answer | {' | '.join(head for head, _ in columns)} |",
        f"| --- |{' ---: |' * len(columns)}",
        *(f"| {label} | {' | '.join(counts[name] for _, counts in columns)} |" for name, label in shown.items()),
        "",
        *healthy_paragraph(),
    ]


def healthy_paragraph() -> list[str]:
    """Return the paragraph of accuracy.md about recorded runs of healthy programs."""
    rows = [row for path in sorted(ROUNDS.glob(f"*/{HEALTHY_FILE}")) for row in rows_in(path.parent, HEALTHY_FILE)]
    if not rows:
        return []
    known = [row for row in rows if row["same losses"] is not None]
    passed = sum(row["exit"] == 0 and row["verdict"] == "PASS" for row in rows)
    text = f"""
        {len(rows)} healthy programs of the rounds ran once without nsa-harness and once as `why` records them:
        {passed} ended without an error both times. The losses were the same, bit for bit, in
        {sum(row["same losses"] for row in known)} of {len(known)} programs ({sum(row["losses"] for row in known):,}
        losses; {len(rows) - len(known)} programs differ from run to run by themselves). In
        {sum(bool(row["division"]) for row in rows)} programs, the recordings show a division of the ranks that changes
        what they communicate, and {sum(bool(row["findings"]) for row in rows)} have a finding.
        `nsa-harness why` names a line of a run that passes only if replicas of its model differ.
        """
    return [*paragraph(text), ""]
