"""No key, option, environment name or exit code that other programs may rely on has gone, or has another type.

What is new is listed here; a change that means to break a reader raises a schema number (docs/internals/contracts.md).
"""

from __future__ import annotations

import json

from contract import CONTRACT, HERE, contract

ADDED = {
    "scenario: train.cpu_steps", "scenario: train.loss", "scenario: expect.metrics.*.device", "events: plan: env.*",
    "commands: bundle", "commands: bundle <[RUN]>", "commands: bundle --to", "commands: bundle --out",
    *(f"commands: {name} --no-redact" for name in ("run", "bisect", "watch", "attach", "report", "bundle")),
    *(f"commands: {name} --git-diff" for name in ("run", "bisect", "watch")),
    *(f"commands: {name} --no-values" for name in ("run", "watch", "attach")),
    "commands: wrong", "commands: wrong <[RUN]>",
    *(f"commands: wrong --{name}" for name in ("line", "cause", "rank", "verdict", "note", "to", "out", "no-redact")),
    "commands: schema <[DOCUMENT]>", "commands: ci matcher",
    "commands: run -m", "commands: run --python", "commands: report --prompt",
    *(f"commands: {name} -v" for name in ("run", "attach", "report", "read", "list")),
    "commands: read", "commands: read <PATH...>", "commands: read --json", "commands: read --out",
    "commands: read --no-redact", "bisect.json: detail.answer.zones", "bisect.json: detail.answer.known",
    "bisect.json: probes[].early", "bisect.json: probes[].started_s", "bisect.json: answer.bounds",
    *(f"bisect.json: answer.bounds.{name}{part}" for name in ("passing", "failing", "open") for part in ("", "[]")),
    "bisect.json: answer.bounds.known",
    "bisect.json: detail.answer.zones[]",
    *(f"bisect.json: detail.answer.zones[].{name}" for name in ("start", "stop", "counts_as")),
    "events: done (bisect): answer.bounds",
    "bisect.json: detail.subject.in_a_row",
    *(f"commands: bisect --{name}" for name in ("ordered", "choice", "seeds", "items", "env-file")),
    "bisect.json: probes[].step_s", "scenario: trace.step_cost",
    *(f"scenario: trace.{name}" for name in ("mem_snapshot", "telemetry", "tensorboard")),
    "ci summary: jobs[].outcomes[].detail.chosen", "events: outcome: outcome.detail.chosen", "outcome: detail.chosen",
    "report.json: outcomes[].detail.chosen",
    "scenario: expect.findings", "scenario: expect.findings[]", "scenario: fault.parameters", "scenario: fault.value",
    *(f"scenario: fault.when.{name}" for name in ("layers", "ranks", "backend", "module")),
    *(f"scenario: fault.when.{name}" for name in ("find_unused_parameters", "static_graph")),
    "report.json: gates", "report.json: gates[]",
    *(f"report.json: gates[].{name}" for name in ("name", "when", "then", "because", "state", "why", "leads")),
    *(f"report.json: gates[].{name}{part}" for name in ("runs", "commands") for part in ("", "[]")),
    *(f"report.json: detail.tree{part}" for part in ("", ".steps", ".steps[]", ".leaf", ".made_from")),
    *(f"report.json: detail.tree.steps[].{name}" for name in ("question", "answer", "why", "leads_to", "command")),
    "commands: run --verify", "commands: claim",
    "commands: claim <[SCENARIO|FILE.py|KEY=VALUE|KEY=A,B]>",
    *(
        f"commands: claim --{name}"
        for name in (
            "commits", "arg", "script", "ranks", "text", "confidence", "budget", "pairs", "dry-run", "list", "json",
            "out", "probe", "no-redact", "git-diff",
        )
    ),
    "scenario: train.keep_last", "scenario: train.async_checkpoint",
    "commands: ready", "commands: ready <SHAPE>", "commands: ready <[KEY=VALUE]>",
    *(f"commands: ready --{name}" for name in ("checklist", "jobs", "dry-run", "json", "out", "probe")),
    *(f"commands: ready --{name}" for name in ("no-redact", "git-diff")),
    "commands: fit", "commands: fit <[RUN...]>", *(f"commands: fit --{name}" for name in ("tokens", "layers", "out")),
}  # fmt: skip
ADDED |= {"commands: export", "commands: export <[RUN]>", *(
    f"commands: export --{name}"
    for name in ("as", "to", "line", "cause", "rank", "verdict", "note", "out", "no-redact")
)}  # fmt: skip
ADDED |= {"commands: ready --planned"}
ADDED |= {"commands: why", "commands: why <[RUN]>", *(
    f"commands: why --{name}"
    for name in ("python", "experiment", "no-values", "repeat", "budget", "dry-run", "patch", "json", "out",
                 "no-redact", "git-diff")
)}  # fmt: skip
ADDED |= {"commands: explain --ranks", "commands: history", "commands: history <[SCENARIO|FILE.py]>", *(
    f"commands: history --{name}" for name in ("last", "json", "out")
), "commands: compare", "commands: compare <BEFORE>", "commands: compare <[AFTER]>", "commands: compare --json",
   "commands: compare --out", "commands: prune", "commands: prune <[RUN...]>", *(
    f"commands: prune --{name}" for name in ("keep", "yes", "pin", "out")
)}  # fmt: skip
ADDED |= {"commands: history --html", "commands: compare --html"}
ADDED |= {f"commands: {name} --notify" for name in ("run", "watch", "ready", "claim", "bisect")}
ADDED |= {"commands: watch --shared", "commands: watch --nodes"}
ADDED |= {f"commands: {name}{part}" for name in ("top", "serve") for part in ("", " <[RUN]>", " --out")} | {
    "commands: serve --port"
}
ADDED |= {
    "commands: ci init", "commands: ci init <SCRIPT|SCENARIO>", "commands: ci summary --before",
    *(f"commands: ci init --{name}" for name in ("ranks", "gitlab", "yes")),
}  # fmt: skip
ADDED |= {"commands: run --retries-infra", "commands: run --distribute", *(
    f"commands: {name} --{option}"
    for name in ("run", "bisect", "claim")
    for option in ("engine", "nodes", "partition", "account", "constraint", "gpus-per-node", "site")
)}  # fmt: skip
ADDED |= {"commands: run --locked", "commands: lock", "commands: lock <[FILE.py|SCENARIO|KEY=VALUE]>", *(
    f"commands: lock {form}" for form in ("--no-redact", "--out", "--python", "--ranks", "--to", "-m", "-v")
)}  # fmt: skip
# The sample run chose values that earlier samples had not to choose.
ADDED |= {"events: outcome: outcome.detail.chosen[]", "events: outcome: outcome.detail.chosen[][]"}
# `ci matrix` and `ci matcher` take any words, and answer with what to do instead and exit code 2: tests/test_ci.py.
GONE = ("commands: ci matrix -", "ci matrix: include")
# A command that gave it goes on as before.
NO_LONGER_REQUIRED = {"commands: attach <PID>"}
SHOWN_OTHERWISE = {"commands: run -t", "commands: selftest --seed"}  # in the help
MAY_BE_NULL = {"scenario: fault.rank"}  # every rank; a file that gives it goes on as before
ADDED_TO_DEFAULTS = {
    "scenario: expect": {"findings": []},
    "scenario: trace": {"step_cost": False, "mem_snapshot": False, "telemetry": True, "tensorboard": False},
    "scenario: train": {"cpu_steps": None, "keep_last": 0, "async_checkpoint": False, "loss": "cross_entropy"},
}
# Further words that a key takes; those it took before mean what they meant.
WORDS_ADDED = {
    "scenario: model.compression": ["mean_mlp"],
    "scenario: model.impl": ["per_token", "dense"],
    "scenario: fault.kind": ["leak", "set_parameters", "starved_loader"],
}
# What a value of such a key holds is new as a whole.
ADDED_BELOW = (
    "detail.stacks", "detail.divergence", "detail.cost", ".left_open", ".facts", "detail.memory", "detail.signals",
    "detail.nccl", "detail.files", "detail.own_status", "detail.raised", "outcomes[].values", "outcome: values",
    "outcome.values", ".vitals[].own_s", ".vitals[].step_s", ".vitals[].step_p90_s",
)  # fmt: skip


def test_everything_that_programs_relied_on_is_still_there_with_its_type() -> None:
    frozen = json.loads(CONTRACT.read_text(encoding="utf-8"))
    frozen = {key: value for key, value in frozen.items() if not key.startswith(GONE)}
    today = json.loads(json.dumps(contract(HERE.parents[1])))
    frozen |= {key: {**frozen[key], "required": False} for key in NO_LONGER_REQUIRED}
    frozen |= {key: {**frozen[key], "metavar": today[key]["metavar"]} for key in SHOWN_OTHERWISE}
    frozen |= {key: {**frozen[key], "types": [*frozen[key]["types"], "null"]} for key in MAY_BE_NULL}
    for key, more in ADDED_TO_DEFAULTS.items():
        frozen[key] = {**frozen[key], "default": {**frozen[key]["default"], **more}}
    for key, words in WORDS_ADDED.items():
        frozen[key] = {**frozen[key], "words": sorted([*frozen[key]["words"], *words])}
    changed = {key: (value, today.get(key, "gone")) for key, value in frozen.items() if today.get(key, "gone") != value}
    assert changed == {}
    # A new cause has its row, and its section is made from that; it is not listed once more here.
    new = {
        key
        for key in set(today) - set(frozen)
        if not key.startswith("findings: ") and not any(one in key for one in ADDED_BELOW)
    }
    assert new == ADDED, "a reader passes over what is new: list it in ADDED"
