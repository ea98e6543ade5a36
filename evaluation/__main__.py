"""The evaluation's commands: rescore everything that is stored, run an experiment, see a round of strangers through.

python -m evaluation score               rescores all stored evidence; says what differs from what is committed
python -m evaluation score --write       the same, and stores the scores and writes the pages
python -m evaluation run NAME            runs the cases of an experiment that have no result yet; resumable
python -m evaluation seal ROUND          hashes of programs and truths -> sealed.json, to commit first
python -m evaluation run ROUND           every program of a round once
python -m evaluation first-sight ROUND   answers of the first run against the truths -> score.json
python -m evaluation why ROUND           `nsa-harness why` on every failing program of a round -> why.jsonl
python -m evaluation why ROUND --healthy recorded runs of healthy programs against plain ones -> why_healthy.jsonl
python -m evaluation healthy             the healthy programs of all rounds again and again -> healthy.json
python -m evaluation replay FILE...      what `nsa-harness wrong` has stored, judged by today's rules
python -m evaluation blind ROUND         which answers of today's rules depend on words of the programs
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from evaluation import blind, corpus, explanations, rescore, strangers
from evaluation.rescore import EXPERIMENTS

_RUNS = ("corpus", *EXPERIMENTS)


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    if options.command == "score":
        return rescore.main(write=options.write)
    if options.command == "run":
        return run(options)
    if options.command == "replay":
        return show(line for file in options.files for line in strangers.replay(file))
    if options.command == "why":
        home = strangers.ROUNDS / options.round
        if options.healthy:
            return show(explanations.run_healthy(home, options.out, options.most, options.python))
        show(explanations.run(home, options.out, options.jobs, options.python))
        return show([explanations.report(home)])
    if options.command == "healthy":
        return show(strangers.healthy(options.out, options.runs, options.jobs))
    by_round = {"seal": strangers.seal, "first-sight": strangers.score, "blind": blind.report}
    return show([by_round[options.command](strangers.ROUNDS / options.round)])


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="python -m evaluation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = whole.add_subparsers(required=True, dest="command")
    commands.add_parser("score").add_argument("--write", action="store_true", help="store scores, and write the pages")
    run = commands.add_parser("run")
    run.add_argument("name", metavar="NAME|ROUND", help=f"{', '.join(_RUNS)}, or a folder of rounds/")
    run.add_argument("--only", default="", metavar="GLOB", help="these cases, which are run again")
    run.add_argument("--minutes", type=float, default=math.inf, help="begin no case after this long")
    run.add_argument("--python", help="the interpreter of the twelve programs")
    run.add_argument("--results", type=Path, help="another file for the results")
    run.add_argument("--forget", action="append", default=[], metavar="GLOB", help="corpus: what matches has not run")
    healthy = commands.add_parser("healthy")
    healthy.add_argument("--runs", type=int, default=300)
    why = commands.add_parser("why")
    why.add_argument("round")
    why.add_argument("--python", help="the interpreter of the ranks")
    why.add_argument("--healthy", action="store_true", help="the healthy programs, recorded and not")
    why.add_argument("--most", type=int, default=1000, help="so many healthy programs at most")
    for command in (run, healthy, why):
        command.add_argument("--jobs", type=int, default=1)
        command.add_argument("--out", type=Path, default=Path("build/evaluation"), help="reports of a round's programs")
    commands.add_parser("replay").add_argument("files", nargs="+", type=Path)
    for name in ("seal", "first-sight", "blind"):
        commands.add_parser(name).add_argument("round")
    return whole


def run(options: argparse.Namespace) -> int:
    if options.name == "corpus":
        chosen = {"only": options.only, "file": options.results}
        show(corpus.run(minutes=options.minutes, forget=options.forget, **chosen))
        return 0 if options.only else int(corpus.has_mistakes(corpus.load()))
    if options.name in EXPERIMENTS:
        experiment = EXPERIMENTS[options.name]
        interpreter = {"python": options.python} if options.python and experiment.takes_python else {}
        limits = {"only": options.only, "minutes": options.minutes, "jobs": options.jobs}
        return show(experiment.run(**limits, file=options.results, **interpreter))
    home = strangers.ROUNDS / options.name
    if not home.is_dir():
        raise SystemExit(f"{options.name} is neither a round nor one of {', '.join(_RUNS)}")
    return show(strangers.run(home, options.out, options.jobs))


def show(lines: Iterable[str]) -> int:
    for line in lines:
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
