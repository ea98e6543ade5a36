"""Programs that nobody here wrote: seal their truths, run them once, and score what was said of them at first sight.

    python tools/strangers.py seal ROUND                 hashes of programs and truths -> sealed.json, to commit first
    python tools/strangers.py run ROUND --out DIR        every program once; goes on where it was stopped
    python tools/strangers.py score ROUND                answers.jsonl against the truths -> score.json, and a table
    python tools/strangers.py healthy --out DIR          the healthy forms of all rounds again and again -> healthy.json
    python tools/strangers.py replay FILE...             what `nsa-harness wrong` has kept, judged by today's rules
    python tools/strangers.py blind ROUND                which answers of today's rules hang on words of the programs

ROUND is a folder below tests/strangers with one folder a brief, each with programs and a truth.json. Programs run from
a copy under a folder name that says nothing. An answer is written once and never again.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import comb
from pathlib import Path
from typing import Any

from nsa_harness.commands.misdiagnosis import PROJECT, said, without_paths
from nsa_harness.render.documents.report_json import outcome_values

HOME = Path(__file__).resolve().parents[1] / "tests" / "strangers"
LINES = 2  # by so many a named line may be off
CERTAIN = 0.9
_ASKED = ("verdict", "rank", "cause", "line", "silent")

# What the words of the truths mean in ours. A cause may belong to several.
FAMILIES = {
    "calls_differ": {
        "rank_conditional_collective", "rank0_only_collective", "root_mismatch", "collective_order_mismatch",
        "shape_mismatch", "dtype_mismatch", "cross_group_deadlock", "group_creation_subset",
    },
    "uneven_data": {"uneven_inputs"},
    "exception": {"exception", "cuda_oom", "cuda_assert", "model_mismatch", "no_gradient"},
    "swallowed_exception": {"swallowed_exception", "thread_died"},
    "host_wait": {
        "blocked_io", "pipe_full", "lock_cycle", "fork_lock", "backward_function_blocked", "pool_worker_lost",
        "stopped_process", "starved", "gil_held_native", "thread_died",
    },
    "loader": {"dataloader_worker_blocked", "dataloader_worker_died", "fork_lock"},
    "p2p": {"p2p_unmatched"},
    "store": {"store_key_missing", "rendezvous_missing_rank"},
    "autograd": {
        "unused_params", "rank_conditional_unused_params", "ready_twice", "static_graph_changed", "no_sync_mismatch",
        "checkpoint_recompute_mismatch", "inplace_modification", "reentrant_no_grad_input", "no_gradient",
    },
    "loop": {"infinite_loop", "livelock", "native_busy_loop"},
    "died": {
        "killed", "segfault", "aborted", "early_exit", "bad_exit", "host_oom", "cuda_oom", "dataloader_worker_died",
    },
    "shutdown": {"shutdown_hang", "orphan_process", "dirty_exit"},
    "slow": {"slow"},
    "silent": {
        "nan", "replica_divergence", "no_gradient", "memory_growth", "no_sync_mismatch", "reentrant_no_grad_input",
        "gradient_order_differs", "swallowed_exception",
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    for name in ("seal", "run", "score", "blind"):
        commands.add_parser(name).add_argument("round")
    commands.add_parser("replay").add_argument("files", nargs="+", type=Path)
    commands.add_parser("healthy").add_argument("--runs", type=int, default=300)
    for name in ("run", "healthy"):
        commands.choices[name].add_argument("--out", type=Path, required=True)
        commands.choices[name].add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    sys.path.insert(0, str(HOME.parents[1]))
    if asked.command == "healthy":
        healthy(asked.out, asked.runs, asked.jobs)
    elif asked.command == "seal":
        seal(HOME / asked.round)
    elif asked.command == "run":
        run(HOME / asked.round, asked.out, asked.jobs)
    elif asked.command == "score":
        print(score(HOME / asked.round))
    elif asked.command == "replay":
        print("\n".join(line for file in asked.files for line in replay(file)))
    else:
        from tools.blind import report

        print(report(HOME / asked.round))


def seal(home: Path) -> None:
    """The hash of every program, and of every truth that stays hidden until the answers stand. Briefs may be added."""
    sealed = HOME / "sealed.json"
    known = json.loads(sealed.read_text()) if sealed.exists() else {}
    before = known.get(home.name, {})
    files = sorted(path for path in home.glob("*/**/*") if path.suffix in (".py", ".json"))
    now = {str(path.relative_to(home)): _digest(path) for path in files}
    changed = [name for name, digest in before.items() if now.get(name) != digest]
    if changed:
        raise SystemExit(f"sealed before, and not the same any more: {', '.join(changed)}")
    known[home.name] = now
    sealed.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    print(f"{len(now)} files sealed, {len(now) - len(before)} of them new")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(home: Path, out: Path, jobs: int) -> None:
    answers = home / "answers.jsonl"
    done = {json.loads(line)["program"] for line in answers.read_text().splitlines()} if answers.exists() else set()
    wanted = [one for one in truths(home) if one["program"] not in done]
    with ThreadPoolExecutor(jobs) as pool, answers.open("a") as lines:
        for answer in pool.map(lambda one: _answer(home, one, out), wanted):
            lines.write(json.dumps(answer, sort_keys=True) + "\n")
            lines.flush()
            print(answer["program"], answer["verdict"], answer["cause"], flush=True)


def truths(home: Path) -> list[dict[str, Any]]:
    """Every program with its truth, its path below the round."""
    found = []
    for path in sorted(home.glob("*/truth.json")):
        for one in json.loads(path.read_text()):
            named = {**one, "program": f"{path.parent.name}/{one['program']}"}
            named["lines"] = [{**line, "file": f"{path.parent.name}/{line['file']}"} for line in one["lines"]]
            found.append(named)
    return found


def healthy(out: Path, runs: int, jobs: int) -> None:
    """Until so many are done at so many at once; goes on where it was stopped. Jobs beyond the cores are the load."""
    kept = HOME / "healthy.json"
    known: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    mine = known.setdefault(f"{jobs} at once on {os.cpu_count()} cores", {"runs": 0, "said against": []})
    programs = [(home, one) for home in sorted(HOME.glob("round*")) for one in truths(home) if one["healthy"]]

    def once(number: int) -> tuple[str, dict[str, Any]]:
        home, truth = programs[number % len(programs)]
        outcome = _outcome(home, truth, out / f"{jobs}" / f"{number}")[0]
        shutil.rmtree(out / f"{jobs}" / f"{number}")
        return f"{home.name}/{truth['program']}", outcome

    with ThreadPoolExecutor(jobs) as pool:
        for program, outcome in pool.map(once, range(mine["runs"], runs)):
            mine["runs"] += 1
            found = [one["code"] for one in outcome["findings"] or []]
            if outcome["verdict"] != "PASS" or found:
                mine["said against"].append({"program": program, "verdict": outcome["verdict"], "findings": found})
            kept.write_text(json.dumps(known, indent=1) + "\n")
            print(mine["runs"], program, outcome["verdict"], *found, flush=True)


def _answer(home: Path, truth: dict[str, Any], out: Path) -> dict[str, Any]:
    outcome, folder, evidence = _outcome(home, truth, out / truth["program"].replace("/", "__"))
    with gzip.open(home / "evidence.jsonl.gz", "at") as recordings:
        recordings.write(f'{{"program": "{truth["program"]}", "evidence": {_without_paths(evidence, folder)}}}\n')
    return {"program": truth["program"], **_said(outcome, str(folder))}


def _outcome(home: Path, truth: dict[str, Any], reports: Path) -> tuple[dict[str, Any], Path, str]:
    """What the harness says of one program, from a copy of its folder whose path tells nothing; and its evidence."""
    program = home / truth["program"]
    with tempfile.TemporaryDirectory(prefix="job") as scratch:
        folder = Path(scratch) / "project"
        shutil.copytree(program.parent, folder)
        command = [
            str(Path(sys.executable).parent / "nsa-harness"), "run", "--script", program.name,
            f"--ranks={truth['ranks']}", f"--out={reports}", "limits.deadline_s=420", "--", *truth["args"],
        ]  # fmt: skip
        # What a program leaves in the folder for temporary files is no other program's business.
        (Path(scratch) / "tmp").mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(Path(scratch) / "tmp")}
        subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, timeout=900)
        report = json.loads(next(reports.glob("*/report.json")).read_text())
        outcome = next(one for one in report["outcomes"] if one["final"])
        return outcome, folder, next(reports.glob("*/*/evidence/*.json")).read_text()


def _without_paths(evidence: str, folder: Path) -> str:
    """What is recorded names no directory of the machine it was recorded on; what is a library stays one."""
    names = ((str(folder), PROJECT), (str(folder.parent), "/home/ada"), (str(HOME.parents[1]), "/home/ada/nsa-harness"))
    return json.dumps(json.loads(without_paths(evidence, names)))


def _said(outcome: dict[str, Any], folder: str) -> dict[str, Any]:
    """Nothing of this machine's folders."""
    summary = outcome["summary"]
    for path, instead in ((folder, "project"), (str(Path(folder).parent), ""), (sys.prefix, "/usr")):
        summary = summary.replace(path, instead)
    return {**said(outcome, folder), "summary": summary}


def replay(file: Path) -> Iterator[str]:
    """Of each recording: what was said, what is said by the rules of today, and what of that is true.

    `file`: as `nsa-harness wrong` wrote it, or the folder that it was unpacked to.
    """
    with tempfile.TemporaryDirectory() as scratch:
        home = _unpacked(file, Path(scratch))
        before = {one["program"]: one for one in map(json.loads, (home / "answers.jsonl").read_text().splitlines())}
        now = dict(_answers_of_today(home))
        for truth in truths(home):
            program = truth["program"]
            row = _judged(truth, now[program])
            right = [name for name in _ASKED if row[name] is True]
            yield f"{program}: {truth['why']}".rstrip(": ")
            yield from (
                f"  {when:6}{_short(one)}" for when, one in (("then", before[program]), ("today", now[program]))
            )
            yield f"  right {', '.join(right) or 'nothing'}; wrong {', '.join(_missed(row)) or 'nothing'}"


def _unpacked(file: Path, scratch: Path) -> Path:
    """The folder of a recording. Nothing in it may lead out of it."""
    if file.is_dir():
        return file
    with tarfile.open(file) as packed:
        # A Python 3.11 before 3.11.4 has no filters.
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(scratch, [one for one in packed if _stays_inside(one)], **safely)
    (home,) = scratch.iterdir()
    return home


def _stays_inside(member: tarfile.TarInfo) -> bool:
    path = Path(member.name)
    return (member.isfile() or member.isdir()) and not path.is_absolute() and ".." not in path.parts


def _answers_of_today(home: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from tools.blind import outcome_of_stored, plain, recordings

    for program, evidence, _ in recordings(home):
        yield program, said(outcome_values(outcome_of_stored(plain(evidence))), PROJECT)


def _short(answer: dict[str, Any]) -> str:
    place = f"{answer['file']}:{answer['line']}" if answer["line"] else ""
    who = f"ranks {answer['ranks']}" if answer["ranks"] else ""
    return " · ".join(part for part in (answer["verdict"], answer["cause"], who, place) if part)


def score(home: Path) -> str:
    """The figures of the round, also written to score.json."""
    answers = {one["program"]: one for one in map(json.loads, (home / "answers.jsonl").read_text().splitlines())}
    rows = [_judged(truth, answers[truth["program"]]) for truth in truths(home) if truth["program"] in answers]
    figures = {name: _share(rows, name) for name in _ASKED}
    sure = [row for row in rows if row["certain"]]
    figures["certain"] = f"{len(sure)} of {sum(row['faulty'] for row in rows)}"
    wrong = sum(row["wrong"] for row in sure)
    figures["certain and wrong"] = f"{wrong} of {len(sure)} (95 % interval {_interval(wrong, len(sure))})"
    false = [row["program"] for row in rows if not row["faulty"] and row["said"] == "HANG"]
    figures["false HANG"] = f"{len(false)} of {sum(not row['faulty'] for row in rows)}"
    (home / "score.json").write_text(json.dumps({"figures": figures, "rows": rows}, indent=1) + "\n")
    misses = [f"  {row['program']}: {', '.join(_missed(row))}" for row in rows if _missed(row)]
    return "\n".join([*(f"{name:18} {text}" for name, text in figures.items()), "missed:", *misses])


def first_sight() -> list[str]:
    """For docs/accuracy.md: the figures of every round, as they stood when its programs were first seen."""
    rounds = [json.loads(path.read_text()) for path in sorted(HOME.glob("*/score.json"))]
    heads = [f"round {number}, of {len(one['rows'])} programs" for number, one in enumerate(rounds, 1)]
    names = dict.fromkeys(name for one in rounds for name in one["figures"])
    return [
        "## Programs of strangers, at first sight",
        "",
        "Whole training programs with ordinary bugs, and their healthy forms, by writers who knew neither rules nor"
        " corpus. What is guilty, why and which lines to change was sealed before the first run"
        " (`tests/strangers/sealed.json`); each round is run and scored once, before anything is learnt from it.",
        "",
        f"| | {' | '.join(heads)} |",
        f"| --- |{' ---: |' * len(rounds)}",
        *(f"| {name} | {' | '.join(one['figures'].get(name, '-') for one in rounds)} |" for name in names),
        "",
        "`line`: within two lines of one that a person may change. `certain and wrong`: called certain, and the rank or"
        " the cause was another.",
        "",
        "## Our own corpus",
        "",
        "A regression test, since the rules were made with these programs in sight.",
        "",
    ]


def _judged(truth: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """None where the truth asks nothing of the kind."""
    faulty = not truth["healthy"]
    silent = faulty and truth["verdict"] == "PASS"
    judged = faulty and not silent
    families = {truth["family"], *truth["also"]}
    codes = set().union(*(FAMILIES.get(one, {one}) for one in families if one))  # a cause stands for itself
    guilty = [sorted(one) for one in truth["guilty"]]
    folder = str(Path(truth["program"]).parent)
    rank = sorted(answer["ranks"]) in guilty if guilty else None
    cause = answer["cause"] in codes if codes else None
    line = any(
        f"{folder}/{answer['file']}" == one["file"]
        and one["from"] - LINES <= (answer["line"] or 0) <= one["to"] + LINES
        for one in truth["lines"]
    )
    certain = judged and (answer["confidence"] or 0) >= CERTAIN
    return {
        "program": truth["program"],
        "faulty": faulty,
        "said": answer["verdict"],
        "verdict": answer["verdict"] == truth["verdict"],
        "rank": rank if judged else None,
        "cause": cause if judged else None,
        "line": line if judged and truth["lines"] else None,
        "silent": bool(codes & set(answer["beside"])) if silent else None,
        "certain": certain,
        "wrong": certain and (rank is False or cause is False),
    }


def _missed(row: dict[str, Any]) -> list[str]:
    return [name for name in _ASKED if row[name] is False]


def _share(rows: list[dict[str, Any]], name: str) -> str:
    counts = Counter(row[name] for row in rows if row[name] is not None)
    return f"{counts[True]} of {counts.total()}"


def _interval(wrong: int, of: int) -> str:
    """Exact (Clopper-Pearson), by bisection on the binomial distribution."""
    low = 0.0 if wrong == 0 else _solve(lambda p: 1 - _below(wrong - 1, of, p), rising=True)
    high = 1.0 if wrong == of else _solve(lambda p: _below(wrong, of, p), rising=False)
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def _below(most: int, of: int, p: float) -> float:
    return sum(comb(of, k) * p**k * (1 - p) ** (of - k) for k in range(most + 1))


def _solve(share: Any, *, rising: bool) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (share(middle) < 0.025) == rising else (low, middle)
    return low


if __name__ == "__main__":
    main()
