"""Records a real attempt as evidence for the tests: `python tests/evidence/record.py ATTEMPT NAME [CHECKOUT]`.

Keeps what the collector reads and nothing it writes. Paths of the machine are replaced by invented ones of the same
length, because boards hold strings with their lengths; CHECKOUT is where the harness that ran it lay, if elsewhere.
expected.json is what verdict.json says: judge an older run with `nsa-harness report` first. Refuses to keep what still
tells of this machine. Look at what it wrote before you keep it, expected.json above all.
"""

from __future__ import annotations

import getpass
import gzip
import importlib.util
import json
import re
import shutil
import socket
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_TORCH = importlib.util.find_spec("torch")
assert _TORCH is not None
assert _TORCH.origin is not None
LIBRARIES = Path(_TORCH.origin).parents[4]  # a worktree may take torch from elsewhere than its own environment
KEPT = (
    *("spec.json", "output.log", "processes.jsonl", "watch.jsonl", "interrupted", "sources.json"),
    *("training.csv", "gate_health.csv"),
)
KEPT_BELOW = (
    *("boards/*.board", "boards/*.json", "boards/*.jsonl", "boards/*.txt", "boards/nccl_trace_rank_*"),
    *("dumps/snapshot*.json", "logs/*/attempt_*/*/*.log", "heartbeat_rank*.jsonl", "grad_order_rank*.jsonl"),
)
PLAIN_BYTES = 4096  # what is longer is kept compressed
# Torch's own traces name the host; loopback addresses tell nothing.
OF_THIS_MACHINE = re.compile(
    rb"|".join(
        [
            *(
                re.escape(str(place).encode())
                for place in (REPOSITORY, Path.home(), sys.prefix, LIBRARIES)
                if place != Path("/")
            ),
            rb"\b%s\b" % re.escape(socket.gethostname().encode()),
            rb"(?<=\buser )%s\b" % re.escape(getpass.getuser().encode()),
            rb"\b(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?=:\d)",
        ]
    )
)


def record(attempt: Path, name: str, checkout: Path) -> None:
    target = Path(__file__).parent / name
    shutil.rmtree(target, ignore_errors=True)
    found = [attempt / one for one in KEPT if (attempt / one).exists()]
    found += [path for pattern in KEPT_BELOW for path in sorted(attempt.glob(pattern)) if path.stat().st_size]
    for source in found:
        data = anonymous(source.read_bytes(), attempt, checkout)
        if told := sorted({found.group() for found in OF_THIS_MACHINE.finditer(data)}):
            raise SystemExit(f"{source}: still says {told}; name the checkout it ran from, or leave it out")
        place = target / source.relative_to(attempt)
        place.parent.mkdir(parents=True, exist_ok=True)
        if len(data) > PLAIN_BYTES:
            place = place.with_name(f"{place.name}.gz")
            data = gzip.compress(data, mtime=0)
        place.write_bytes(data)
    (target / "expected.json").write_text(json.dumps(expected(attempt), indent=1) + "\n")


def anonymous(data: bytes, attempt: Path, checkout: Path) -> bytes:
    places = {str(attempt.resolve().parent): "/home/ada/reports/run", str(checkout): "/home/ada"}
    places |= {
        str(REPOSITORY): "/home/ada",
        sys.prefix: "/home/venv",
        str(LIBRARIES): "/home/venv",
        sys.base_prefix: "/usr",
    }
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
        "silent": [[one["code"], one["ranks"]] for one in verdict["findings"] if verdict["verdict"] == "PASS"],
    }


if __name__ == "__main__":
    record(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]) if len(sys.argv) > 3 else REPOSITORY)
