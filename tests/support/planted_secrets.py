"""Forty made up secrets of ten kinds in five places, and where a run must not show them."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

PLACES = ("argv", "environment", "exception", "log", "diff")
KINDS = ("aws", "github", "gitlab", "hugging face", "openai", "slack", "google", "jwt", "address", "named")
EACH = 8
# The program's own logs, and what is kept to repeat the run: neither is ever shared.
_KEPT = {"spec.json", "plan.json", "secrets.json", "output.log", "stdout.log", "stderr.log"}


def secret(kind: str, seed: str) -> str:
    """Parted, so that no scanner of this repository takes one for real."""
    noise = hashlib.sha512(f"{kind} {seed}".encode()).hexdigest()
    return {
        "aws": "AK" + "IA" + noise[:16].upper(),
        "github": "gh" + "p_" + noise[:36],
        "gitlab": "gl" + "pat-" + noise[:20],
        "hugging face": "h" + "f_" + noise[:34],
        "openai": "s" + "k-proj-" + noise[:40],
        "slack": "xo" + "xb-" + noise[:11] + "-" + noise[11:35],
        "google": "AI" + "za" + noise[:35],
        "jwt": "ey" + "J" + noise[:20] + "." + noise[20:60] + "." + noise[60:90],
        "address": "p." + noise[:9],
        "named": base64.b32encode(noise[:10].encode()).decode()[:13].lower() + "~x",
    }[kind]


def planted() -> dict[str, dict[str, str]]:
    """place -> how it stands there -> the secret. Each kind stands in four of the places."""
    found: dict[str, dict[str, str]] = {place: {} for place in PLACES}
    for number in range(EACH * len(PLACES)):
        place, kind = PLACES[number // EACH], KINDS[number % len(KINDS)]
        value = secret(kind, str(number))
        said = {"address": f"redis://user:{value}@cache.local:6379/0", "named": f"api_key={value}"}.get(kind, value)
        found[place][said] = value
    return found


def command_words() -> list[str]:
    words = []
    for number, said in enumerate(planted()["argv"]):
        name, _, value = said.rpartition("api_key=")
        words += ["--api-key", value] if not name and value != said else [f"--option-{number}", said]
    return words


def environment() -> dict[str, str]:
    return {
        ("CACHE_URL" if "://" in said else f"PLANTED_{number}_TOKEN"): said.removeprefix("api_key=")
        for number, said in enumerate(planted()["environment"])
    }


def values() -> list[str]:
    return [value for of_place in planted().values() for value in of_place.values()]


def shown(run: Path) -> dict[str, list[str]]:
    """The files of a run directory that show one of them, with those that they show. Which one is never a log."""
    known = values()
    assert len(set(known)) == EACH * len(PLACES)
    leaks = {}
    for path in sorted(run.rglob("*")):
        inside = path.relative_to(run).parts
        if path.is_file() and path.name not in _KEPT and "logs" not in inside:
            data = path.read_bytes()
            if found := [value for value in known if value.encode() in data]:
                leaks["/".join(inside)] = found
    return leaks


PROGRAM = """
import os, sys, threading, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for line in {log!r}:
    print("log:", line, flush=True)
    print("log:", line, file=sys.stderr, flush=True)
print("connected as", [value for name, value in os.environ.items() if name.startswith("PLANTED_")], flush=True)
if dist.get_rank() == 1:
    threading.Thread(target=threading.Event().wait, name={log!r}[0]).start()
    raise RuntimeError("refused: " + " ".join({exception!r}) + " " + " ".join(sys.argv) + " " + str(dict(os.environ)))
dist.barrier()
"""


def program() -> str:
    """Says all that it was given, and raises; a thread of it stays, so that it hangs and dumps are taken."""
    everything = planted()
    return PROGRAM.format(log=list(everything["log"]), exception=list(everything["exception"]))
