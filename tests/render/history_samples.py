"""Made-up histories and comparisons, as pages: quiet ones, and one with everything that a hostile report can choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from render_samples import DEADLOCK, POISON

from nsa_harness.core.comparison.history import Entry, compare
from nsa_harness.render.history import comparison_page, history_page

CALLS = (
    {"kind": "added", "count": 2, "after": {
        "group": "dp", "op": "all_reduce", "dtype": "float32", "elements": 1, "site": "train.py log",
    }},
)  # fmt: skip


def entry(
    number: int, verdict: str = "PASS", *, step_s: float | None = 0.1, commit: str = "aaaa", **more: str
) -> Entry:
    """`more`: the scenario, and further surroundings."""
    numbers = {"wall time": 11.0, "memory per rank": 4e8 + number * 1e6} | ({"step": step_s} if step_s else {})
    scenario = more.pop("scenario", "train")
    return Entry(
        run_id=f"20261128T{number:06d}-{number:04x}", directory="train", scenario=scenario, spec_hash="1",
        verdict=verdict, cause=None if verdict == "PASS" else "lock_cycle", expected=verdict == "PASS",
        summary="rank 1 waits for a lock", numbers=numbers,
        surroundings={"host": "node7", "commit": commit, "package torch": "2.13.0", **more},
    )  # fmt: skip


# A slower step and a hang since commit bbbb, a run without a step, and a flake after commit cccc.
TRAIN = (
    *(entry(number, step_s=0.1 + number % 3 / 500) for number in range(12)),
    *(entry(number, step_s=0.13, commit="bbbb", **{"variable OMP": "4"}) for number in (12, 13)),
    entry(14, "HANG", step_s=None, commit="bbbb", **{"variable OMP": "4"}),
    *(entry(number, step_s=0.1, commit="cccc") for number in (15, 16)),
    entry(17, "FAIL", step_s=0.11, commit="cccc"),
    entry(18, step_s=0.1, commit="cccc"),
)
EVAL = tuple(entry(number, scenario="eval") for number in (20, 21))
BAD = tuple(
    Entry(
        run_id=f"2026T{POISON}-{number}", directory=POISON, scenario=POISON * 3, spec_hash=POISON, verdict=verdict,
        cause=POISON, expected=False, summary=POISON, numbers={"step": value, POISON: 1.0},
        surroundings={POISON: POISON + str(number), **{f"variable {at}": str(number) * 900 for at in range(1000)}},
    )
    for number, (verdict, value) in enumerate([("PASS", -9e17), (POISON, 9e17), ("HANG", 0.0)])
)  # fmt: skip


def compared(before: Entry, after: Entry, earlier: Sequence[Entry], address: str = "reports") -> str:
    deadlock = replace(DEADLOCK, dir=after.directory)
    comparison = replace(compare(before, after, earlier), calls=CALLS)
    outcomes = {(after.run_id, after.directory): deadlock} if after.verdict == "HANG" else {}
    return comparison_page([comparison], outcomes, earlier, [address, address])


PAGES = {
    "history": history_page([TRAIN], "reports", 10),
    "histories": history_page([TRAIN, EVAL], "..", 10, ["20261128T000022-0016: no report"]),
    "history_of_one": history_page([TRAIN[:1]], "reports", 10),
    "history_hostile": history_page([BAD, EVAL], "reports", 10, [POISON]),
    "compare_hang": compared(TRAIN[0], TRAIN[14], TRAIN),
    "compare_slow": compared(TRAIN[0], TRAIN[13], TRAIN),
    "compare_hostile": compared(BAD[0], BAD[2], BAD),
}
