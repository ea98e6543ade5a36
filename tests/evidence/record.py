"""Records a real attempt as evidence for the tests: `python tests/evidence/record.py ATTEMPT NAME`.

Keeps what the collector reads and nothing it writes. Paths of the machine are replaced by invented ones of the same
length, because boards hold strings with their lengths. Look at what it wrote before you
keep it, expected.json above all.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
KEPT = ("spec.json", "output.log", "processes.jsonl", "watch.jsonl", "interrupted", "training.csv")
KEPT_BELOW = (
    *("boards/*.board", "boards/*.json", "boards/*.txt", "dumps/snapshot*.json"),
    *("logs/*/attempt_*/*/*.log", "heartbeat_rank*.jsonl"),
)
PLAIN_BYTES = 4096  # what is longer is kept compressed


def record(attempt: Path, name: str) -> None:
    target = Path(__file__).parent / name
    shutil.rmtree(target, ignore_errors=True)
    found = [attempt / one for one in KEPT if (attempt / one).exists()]
    found += [path for pattern in KEPT_BELOW for path in sorted(attempt.glob(pattern)) if path.stat().st_size]
    for source in found:
        data = anonymous(source.read_bytes())
        place = target / source.relative_to(attempt)
        place.parent.mkdir(parents=True, exist_ok=True)
        if len(data) > PLAIN_BYTES:
            place = place.with_name(f"{place.name}.gz")
            data = gzip.compress(data, mtime=0)
        place.write_bytes(data)
    (target / "expected.json").write_text(json.dumps(expected(attempt), indent=1) + "\n")


def anonymous(data: bytes) -> bytes:
    places = {str(REPOSITORY): "/home/ada", sys.prefix: "/home/venv", sys.base_prefix: "/usr"}
    for real, invented in places.items():
        data = data.replace(real.encode(), invented.ljust(len(real), "_")[: len(real)].encode())
    return data


def expected(attempt: Path) -> dict[str, object]:
    verdict = json.loads((attempt / "verdict.json").read_text())
    culprit = verdict["culprit"] or {}
    place = culprit.get("place") or {}
    return {
        "status": verdict["verdict"],
        "kind": verdict["kind"],
        "cause": verdict["cause"],
        "ranks": culprit.get("ranks"),
        "step": culprit.get("step"),
        "line": place.get("line"),
        "module": place.get("module"),
        "trouble": [one["what"] for one in verdict["trouble"]],
    }


if __name__ == "__main__":
    record(Path(sys.argv[1]), sys.argv[2])
