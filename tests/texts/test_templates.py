"""Every template of causes.toml makes a sentence of the facts that rules give it, also without each optional fact."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import meta, nodes

from nsa_harness.core.diagnosis.causes import Cause, Caveat
from nsa_harness.core.diagnosis.confidence import EvidenceKind
from nsa_harness.core.diagnosis.context import DiagnosisContext
from nsa_harness.core.diagnosis.engine import Diagnosis, diagnose
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion
from nsa_harness.core.diagnosis.rules import RULES
from nsa_harness.core.report import Place
from nsa_harness.core.verdict.verdict import judge
from nsa_harness.subject.tables import RULES as OWN_RULES
from nsa_harness.texts.causes import LEFT_OPEN, SHARED, sections
from nsa_harness.texts.sentences import in_words
from nsa_harness.texts.templates import environment, render_template

FROZEN = Path(__file__).resolve().parents[1] / "frozen"
TABLES = {LEFT_OPEN, SHARED, "child_wait", "could_end", "refused", "what_follows", "unseen"}  # sections of no cause

LINE = Place(file="/own/train.py", line=31)
# Facts of causes that no frozen evidence shows, or not in each variant.
BY_HAND: dict[str, list[dict[str, Any]]] = {
    "node_lost": [
        {"lost": lost, "lost_ranks": 2 * len(lost), "world_size": 4, "missing": ("n3",)} for lost in ((), ("n1", "n2"))
    ],
    "slow_link": [
        {
            "local_host": "10.0.0.1",
            "peer_host": "10.0.0.2",
            "bytes_per_s": 2e6,
            "busy_percent": 66.7,
            "sent_bytes": 40_000_000,
            "retransmitted": retransmitted,
            "other_bytes_per_s": other,
        }
        for retransmitted, other in ((0, None), (3, 1e8))
    ],
    "infra": [
        {
            "variant": "unanswered",
            "by_rank": by_rank,
            "peer": "10.0.0.1:29400",
            "waited_s": 39.0,
            "attempts": 6,
            "failure": "the launcher ended with exit code 1",
            "open_files": None,
        }
        for by_rank in (None, 3)
    ]
    + [
        {
            "variant": "refused job",
            "reason": "sbatch: Invalid feature specification",
            "open_files": None,
        },
        {
            "variant": "loopback",
            "message": "connectFullMesh failed",
            "open_files": None,
        },
        {
            "variant": "unresolved",
            "host": "node-7",
            "error": "Name or service not known",
            "failure": "the launcher ended with exit code 1",
            "open_files": None,
        },
    ],
    "hidden_package": [{"file": "/own/torch.py", "launcher": launcher} for launcher in (False, True)],
    "framework_phase": [
        {
            "hooks": hooks,
            "conditions": conditions,
            "framework": "lightning",
            "called_at": LINE,
            "positions": (
                {"ranks": (0, 2), "function": "Loop.advance", "line": LINE},
                {"ranks": (1,), "function": "Checkpoint.on_train_end", "line": LINE},
            ),
            "last_callbacks": ({"ranks": (0, 1, 2), "function": "training_step", "line": LINE},),
        }
        for hooks, conditions in (
            (("Net.training_step",), ()),
            (("Stop.on_fit",) * 4, ({"function": "Stop.on_fit", "text": "if rank == 1", "line": LINE},) * 2),
        )
    ],
    "rank_conditional_collective": [
        {
            "variant": "recomputed",
            "own_call": {"op": "all_reduce", "number": 3, "group": "0", "line": LINE},
            "finished": (0,),
            "recomputed_function": "Block.forward",
            "recomputed_at": LINE,
            "last_module": "blocks.3",
            "condition": None,
            "inside_with": None,
        },
    ],
    "rpc_deadlock": [
        {
            "callers": ({"ranks": (0, 1), "call": "rpc_sync", "line": LINE},),
            "handlers": (
                {
                    "ranks": (0,),
                    "function": "add",
                    "line": LINE,
                    "calls": "rpc_sync",
                    "lock_taken_at": None,
                    "thread": "",
                },
                {"ranks": (1,), "function": "add", "line": LINE, "calls": "", "lock_taken_at": LINE, "thread": "bg"},
                {"ranks": (2,), "function": "add", "line": None, "calls": "", "lock_taken_at": None, "thread": ""},
            ),
        },
    ],
    "debugger_waits": [
        {"debugger": "pdb", "closed": False, "target": "/dev/pts/3"},
        {"debugger": "debugpy", "closed": True, "target": ""},
    ],
    "store_key_missing": [
        {
            "waiting_rank": 0,
            "key": "data/path",
            "line": LINE,
            "others_wait": False,
            "gave_up": True,
            "set_before": None,
            "setter": {"line": LINE, "ranks": ranks, "under": under, "turns_off_at": off},
            "went_past": None,
        }
        for ranks, under, off in (((0,), "rank == 0", LINE), ((), None, None))
    ],
    "deepened": [
        {"variant": "forward", "function": "forward", "operation": "MulBackward0"},
        {"variant": "recomputation", "function": "forward", "operation": "aten.tanh", "instead": "aten.addmm"},
        {"variant": "parameters", "names": ("a.weight", "a.bias", "b.weight", "b.bias")},
        {"variant": "growth", "grown_bytes": 8 << 20, "first_step": 9, "last_step": 17},
        *(
            {
                "variant": "rerun",
                "change": "again",
                "changed": "nothing changed, the same seed",
                "attempt": 2,
                "shown": shown,
                "shown_advice": "Start at that line.",
                "ended": ended,
                "verdict": "FAIL",
                "cause": "exception",
                "line_before": LINE,
                "line_now": None,
                "losses": {"before": 5.5, "now": 5.25},
                "repeat": "nsa-harness run a.yaml",
            }
            for ended in ("passed", "the same", "otherwise")
            for shown in ("", "the forward line is model.py:11")
        ),
    ],
    "expectation_missed": [
        {"variant": "no communication", "file": "a.comm.lock", "reason": "no optimizer step ended on every rank"},
        *(
            {
                "variant": "communication",
                "file": "a.comm.lock",
                "who": who,
                "number": 4,
                "steady": steady,
                "counts": ({"kind": "added", "count": 1}, {"kind": "changed", "count": 2}),
                "changes": (),
                "bytes_before": 132612,
                "bytes_after": after,
            }
            for who, steady, after in (("all", True, 132616), ("0, 1", False, 132612))
        ),
        {"variant": "finding", "finding": "nan"},
        {"variant": "gradients not traced", "missing_gradients": 0},
        {"variant": "gradients", "missing_gradients": 0, "seen": ({"rank": 1, "missing": 2},)},
        {"variant": "not reported", "metric": "loss_last", "reported": ()},
        {"variant": "metric", "metric": "loss_last", "value": 5.7, "sign": "<", "limit": 5.6},
    ],
    "same_place": [
        {
            "attempts": 5,
            "count": count,
            "verb": "hangs",
            "others": ({"count": 1, "verb": "fails", "line": LINE},),
            "elsewhere": 1,
            "at_no_known_line": 1,
            "passed": 1,
        }
        for count in (1, 2)
    ],
    "disk_full": [
        {"variant": "not judged", "disk": "quota", "error": "the launcher could not be started"},
        {"variant": "failed", "disk": "no space", "failure": "rank 1 ended with exit code 1"},
    ],
    "gpu_fault": [
        {
            "gpus": (
                {
                    "index": 3,
                    "bus": "00000000:65:00.0",
                    "node": "node7",
                    "ranks": (3,),
                    "errors": ("48, pid=71",),
                    "ecc_errors": 1,
                    "needs_reset": True,
                    "has_failed_repair": True,
                    "slowdowns": ("power brake", "thermal"),
                    "lanes": (8, 16),
                },
            ),
            "count": 3,
        }
    ],
    "idle_device": [
        {
            "idle_gpu": {"index": 1, "utilisation": 0.0, "used_bytes": 4 << 20},
            "shared_gpu": {"index": 0, "utilisation": 0.97, "used_bytes": 4 << 30},
            "ranks_sharing": 2,
            "gpus_shared": 1,
        }
    ],
    "inconclusive": [{"error": "what was read shows nothing"}],
    "memory_excess": [
        {
            "variant": variant,
            "taken_bytes": float(9 << 30),
            "expected_bytes": float(1 << 30),
            "times": 9.0,
            "layers": 2,
            "batch": 1.0,
            "tokens": 512.0,
        }
        for variant in ("graph", "step")
    ],
    "per_token_nodes": [{"nodes": 9e5, "nodes_of_a_token": 8.0, "tokens": 512.0, "layers": 2}],
    "quadratic_cost": [
        {"variant": "memory", "kept_bytes": float(1 << 30), "square_bytes": float(9 << 29), "tokens": 512.0},
        {
            "variant": "time",
            "quantity": "time",
            "exponent": 2.0,
            "exponent_low": 1.9,
            "exponent_high": 2.1,
            "tokens_from": 256,
            "tokens_to": 2048,
            "implementations": "sel triton",
        },
    ],
    "rank_absent": [
        {
            "waiting": (0, 2),
            "blocked_in": "all_reduce",
            "line": LINE,
            "gave_up": "Timed out waiting",
            "may_have_waited_too": False,
            "elsewhere": elsewhere,
            "last_call": call,
        }
        for elsewhere, call in (
            ({"rank": 1, "blocked_in": "read"}, None),
            (None, {"op": "barrier", "number": 6, "group": "tp", "line": LINE}),
        )
    ],
    "transport": [{"variant": "not delivered", "waiting_ranks": 2, "blocked_in": "all_reduce"}],
    "thread_died": [
        {
            "died": "thread",
            "error": "ValueError: x",
            "raised_at": place,
            "function": "step",
            "line": None,
            "living": living,
        }
        for place in (None, LINE)
        for living in (None, {"thread": "reader", "call": "Queue.get", "line": LINE, "function": "fill"})
    ],
    "diverged_before_history": [{"group": "0"}],
    "recorder_lacks_numbers": [{"group": "0", "ranks": (0, 1)}],
    "text": [{"text": "it may have been slow"}],
    "caught_something": [{"rank": 1, "exception": "ValueError", "line": LINE}],
    "input_bound": [{"slowest_rank": 1, "waited_s": 41.0, "passed_s": 60.0, "last_step": 24}],
    "straggler": [
        {
            "slowest_rank": 1,
            "own_s": 0.84,
            "usual_s": 0.4,
            "ratio": 2.1,
            "lost_s": 0.44,
            "step_s": 0.9,
            "steps": 120,
            "phase": phase,
        }
        | {"ranks": ranks, "other_ranks": (0, 3)}
        for phase in (None, "loading", "backward", "other")
        for ranks in ((1,), (1, 2))
    ],
    "nan": [
        {"variant": "loss", "value": "nan", "other_ranks_broke_later": True, "parameter": "head.weight"},
        {"variant": "parameters", "value": "inf", "other_ranks_broke_later": False, "parameter": None, "ranks": (0, 1)},
    ],
    "no_gradient": [
        {"variant": "refused"},
        {"variant": "traced", "parameters": ["a", "b", "c", "d"]},
        {"variant": "optimizer_has_none", "parameters": ["a"], "count": 1, "place": Place(parameter="a")},
        {"variant": "optimizer_has_zeros", "count": 8, "samples": 9},
        {"variant": "backward_left_zeros", "model": "Net", "samples": 9},
        {"variant": "backward_left_none", "parameters": ("a", "b"), "count": 4, "model": "Net", "samples": 9},
    ],
    "replica_divergence": [
        {
            "in_ddp": in_ddp,
            "since": since,
            "last_step": 2,
            "identified_by": identified_by,
            "parts": ("a .. b", "c", "d"),
            "difference": 0.012345,
        }
        for in_ddp in (True, False)
        for since in ("made", "begun", "stepped", "before", "over")
        for identified_by in ("outside", "extra step", "fewer", "")
    ],
    "shared_file": [{"path": "/own/best.pt", "more_files": 1, "ranks": (0, 1)}],
    "swallowed_exception": [
        {"variant": "lost_batches", "exception": "ValueError", "batches": 2, "other_exceptions": 1}
    ],
    "uninitialised_parameters": [{"parameter": "head.scale", "more_parameters": 2, "model": "Net", "value": "2.2e+32"}],
    "unwaited_collective": [{"op": "all_reduce", "calls": 48, "more_lines": 1}],
}


@cache
def explanations() -> tuple[Explanation, ...]:
    """What every rule says of every frozen evidence, with the facts of each."""
    sys.path.insert(0, str(FROZEN))
    from freeze import evidence_lines, evidence_of

    found: list[Explanation] = []
    for line in evidence_lines():
        evidence = evidence_of(json.loads(line))
        context = DiagnosisContext(evidence=evidence, judgement=judge(evidence))
        rules = [rule for rules in RULES.values() for rule in rules] + [*OWN_RULES]
        found += [answer for rule in rules if (answer := rule(context)) is not None]
        found += diagnose(evidence, context.judgement, OWN_RULES).explanations
    return tuple(found)


@cache
def samples(section: str, code: str = "") -> tuple[dict[str, Any], ...]:
    """What the templates of a cause are given, or that of one question which is left open."""
    if section == LEFT_OPEN:
        questions = (question for one in explanations() for question in one.open_questions if question.code == code)
        return (*(dict(question.facts) for question in questions), *BY_HAND.get(code, []))
    shared = {"place": Place(file="/own/train.py", line=3, function="step"), "step": 2, "remedy": "Do."}
    of_cause = [one for one in explanations() if one.cause == section]
    given = [
        {
            **{name: on_one_line(fact) for name, fact in one.facts.items()},
            "ranks": one.ranks or (1,),
            "rank": (one.ranks or (1,))[0],
        }
        for one in of_cause
    ]
    by_hand = [{"ranks": (1,), "rank": 1, **facts} for facts in BY_HAND.get(section, [])]
    unlike = {repr(sorted(one.items())): {**shared, **one} for one in (*given, *by_hand) if "claim" not in one}
    return tuple(unlike.values())


def on_one_line(fact: Any) -> Any:
    """The fact as a template gets it from a program whose messages have one line."""
    match fact:
        case str():
            return " ".join(fact.split())
        case tuple():
            return tuple(map(on_one_line, fact))
    return fact


def templates() -> Iterator[tuple[str, str]]:
    for section, texts in sections().items():
        if section == LEFT_OPEN or "claim" in texts:
            yield from ((section, key) for key in texts if section == LEFT_OPEN or key in ("claim", "advice"))


def asked_in(section: str, key: str, variant: str) -> set[str]:
    """The facts that an `if` of the template asks for, by themselves or as `is none`."""
    tree = environment().parse(sections()[section][key])
    asked = {name for node in tree.find_all((nodes.If, nodes.CondExpr)) for name in _asked(node.test)}
    included = (node.template for node in tree.find_all(nodes.Include))
    names = (one.value if isinstance(one, nodes.Const) else variant for one in included)
    return asked.union(*(asked_in(SHARED, name, variant) for name in names))


def _asked(test: nodes.Node) -> Iterator[str]:
    match test:
        case nodes.Name():
            yield test.name
        case nodes.Test() | nodes.Not():
            yield from _asked(test.node)
        case nodes.And() | nodes.Or():
            yield from (*_asked(test.left), *_asked(test.right))


def absent(value: object) -> object:
    """What a rule passes where there is none of it."""
    return {bool: False, int: 0, str: "", tuple: (), list: []}.get(type(value))


@pytest.mark.parametrize(("section", "key"), list(templates()))
def test_a_template_makes_a_sentence_with_each_optional_fact_and_without(section: str, key: str) -> None:
    facts = samples(section, key if section == LEFT_OPEN else "")
    if not facts and not meta.find_undeclared_variables(environment().parse(sections()[section][key])):
        facts = ({},)
    assert facts, f"no frozen evidence shows {key} of {section}: give facts of it in BY_HAND"
    for one in facts:
        assert_sentence(render_template(section, key, one))
        for name in asked_in(section, key, one.get("variant", "")) & set(one):
            assert_sentence(render_template(section, key, {**one, name: absent(one[name])}))
            for other in facts:
                if name in other and other[name] and one.get("variant") == other.get("variant"):
                    assert_sentence(render_template(section, key, {**one, name: other[name]}))


def assert_sentence(text: str) -> None:
    assert "{" not in re.sub(r"`[^`]*`", "", text)
    assert "  " not in text, text
    assert not re.search(r" [,;.:](?: |$)|\bNone\b|Place\(", text), text
    assert text == text.strip()


@pytest.mark.parametrize("cause", Cause)
def test_all_facts_of_a_cause_are_named_alike_wherever_it_is_found(cause: Cause) -> None:
    """A template may name no fact that some rule leaves out; StrictUndefined finds it only in the run that has none."""
    for variant in {one.get("variant") for one in samples(cause)}:
        alike = [set(one) for one in samples(cause) if one.get("variant") == variant]
        assert all(one == alike[0] for one in alike)


def test_every_caveat_has_its_words() -> None:
    assert {caveat.value for caveat in Caveat} <= set(sections()[LEFT_OPEN])
    for facts in samples(LEFT_OPEN):
        assert facts.keys() <= {
            "rank",
            "blocked_in",
            "unseen",
            "failure",
            "exception",
            "line",
            "text",
            "group",
            "ranks",
        }


def test_every_section_is_a_cause_and_every_cause_a_section() -> None:
    assert list(sections())[: len(Cause)] == [cause.value for cause in Cause]
    assert set(list(sections())[len(Cause) :]) == TABLES


def told(cause: Cause, **facts: Any) -> Any:
    one = Explanation(
        cause=cause, evidence=EvidenceKind.FACT, facts=facts, ranks=(1,), left_open=(OpenQuestion(code="x"),)
    )
    return in_words(
        Diagnosis(cause=cause, culprit=None, explanations=(one,), divergence=None, meshes={}, counts_steps=True)
    )


def test_a_sentence_that_cannot_be_made_costs_no_verdict_and_is_noted() -> None:
    words = told(Cause.PIPE_FULL, line=Place(file="/own/train.py", line=12), child=17)
    (finding,) = words.findings
    assert finding.code == "pipe_full"
    assert finding.claim == "pipe_full (line=/own/train.py:12, child=17, ranks=(1,), rank=1)"
    assert finding.left_open == ("x",)
    assert [one.what for one in words.trouble] == ["the claim of pipe_full", "the x of left_open"]
    assert "has no attribute 'pid'" in words.trouble[0].why


def test_none_is_never_printed_and_a_missing_fact_is_an_error() -> None:
    words = told(Cause.BACKWARD_FUNCTION_BLOCKED)
    assert "'function' is undefined" in words.trouble[0].why
    assert environment().from_string("{{ x }}").render(x="a") == "a"
    with pytest.raises(Exception, match="None was printed"):
        environment().from_string("{{ x }}").render(x=None)
