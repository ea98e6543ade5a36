"""Describe a run's findings in sentences, using the templates in causes.toml.

If a template fails, the verdict does not change. The finding then shows its cause code and its facts instead of a
sentence, and the error is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_harness.core.diagnosis.causes import Cause
from nsa_harness.core.diagnosis.engine import Diagnosis
from nsa_harness.core.diagnosis.explanation import Explanation, OpenQuestion, json_facts
from nsa_harness.core.diagnosis.stall_note import StalledRanks, StallNote
from nsa_harness.core.evidence.evidence import ClockSkew, Evidence
from nsa_harness.core.evidence.network import UnansweredConnection, UnresolvedHost
from nsa_harness.core.outcome.wording import Meshes, located_rank, shorten
from nsa_harness.core.report import Finding, Outcome, Place, Trouble
from nsa_harness.texts.causes import LEFT_OPEN, SHARED, remedy, sections, text_of
from nsa_harness.texts.templates import render_template
from nsa_harness.texts.words import duration, ranks, verb_for, whole_place_name


@dataclass(frozen=True, kw_only=True)
class Words:
    """A run's findings as sentences, and the errors that occurred while they were rendered."""

    findings: tuple[Finding, ...]
    trouble: tuple[Trouble, ...]


def in_words(diagnosis: Diagnosis) -> Words:
    """Return a diagnosis's findings as sentences, with mesh coordinates, and only counted step numbers."""
    trouble: list[Trouble] = []
    findings = tuple(_in_words(explanation, diagnosis, trouble) for explanation in diagnosis.explanations)
    return Words(findings=findings, trouble=tuple(trouble))


def with_words(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the outcomes with the sentences for their findings and diagnostic reruns filled in."""
    with_claims = tuple(map(_with_claims, outcomes))
    return tuple(
        replace(outcome, rerun_answer=outcome.rerun_answer or _rerun_claim(outcome, with_claims))
        for outcome in with_claims
    )


def _with_claims(outcome: Outcome) -> Outcome:
    trouble: list[Trouble] = []
    findings = tuple(finding if finding.claim else with_claim(finding, trouble) for finding in outcome.findings)
    verdict = outcome.verdict
    if verdict.cause == Cause.EXPECTATION_MISSED and not verdict.summary:
        claims = [finding.claim for finding in findings if finding.code == verdict.cause]
        more = f" (and {len(claims) - 1} more)" if len(claims) > 1 else ""
        verdict = replace(verdict, summary=claims[0] + more)
    return replace(outcome, findings=findings, verdict=verdict, trouble=(*outcome.trouble, *trouble))


def with_claim(finding: Finding, trouble: list[Trouble]) -> Finding:
    """Return the finding with its claim and advice as text. Errors of templates are added to `trouble`."""
    facts = _template_facts(finding.code, finding.facts, finding.ranks, finding.place)
    claim, advice = (_render(finding.code, key, facts, trouble) for key in ("claim", "advice"))
    return replace(finding, claim=claim, advice=advice, facts=json_facts(finding.facts))


def _rerun_claim(outcome: Outcome, outcomes: Sequence[Outcome]) -> str | None:
    """Return a sentence about the result of a diagnostic rerun, or None if there is no result."""
    rerun = outcome.spec.deepening
    if rerun is None:
        return None
    bases = (base for base in outcomes if (base.spec.scenario, base.attempt) == (outcome.spec.scenario, rerun.of))
    findings = (finding for base in bases for finding in base.findings if finding.code == Cause.DEEPENED)
    return next((finding.claim for finding in findings if finding.facts.get("attempt") == outcome.attempt), None)


def stall_text(note: StallNote) -> str:
    """Describe a stall and what could end it, such as "rank 1 is blocked in read (loader.py:13) on data.fifo"."""
    reasons = sections()["could_end"]
    possible_ends = [reasons.get(kind, reasons["unknown"]) for kind in note.open_waits]
    if note.moving_ranks:
        possible_ends = [f"{ranks(note.moving_ranks)} still {verb_for('makes', note.moving_ranks)} progress"]
    parts = [*map(_stalled_text, note.stalled_ranks), *dict.fromkeys(possible_ends)]
    parts += [] if note.left_s is None else [f"HANG in {duration(note.left_s)} unless the run makes progress"]
    return "; ".join(parts)


def unreachable_text(found: UnansweredConnection | UnresolvedHost) -> str:
    """Say that nothing answers a connection, or that the host at which the ranks meet has no address."""
    if isinstance(found, UnresolvedHost):
        return f"the launcher asks for the host {shorten(found.host, 80)}, which has no address here: {found.error}"
    who = "the launcher" if found.rank is None else ranks((found.rank,))
    return (
        f"{who} has been trying to connect to {found.peer} for {duration(found.waited_s)}, and nothing answers: a"
        " firewall drops the packets, or no machine has this address"
    )


def _stalled_text(row: StalledRanks) -> str:
    """Describe where some ranks are blocked, such as "ranks 0, 2 are blocked in all_reduce #3 (train.py:18)"."""
    # Only the verb depends on the number of ranks: "is blocked" changes its first word, "computes" its last letter.
    verb, _, rest = row.state.partition(" ")
    text = f"{ranks(row.ranks)} {verb_for(verb, row.ranks)}{rest and f' {rest}'}"
    text += f" in {row.blocked_in}" if row.blocked_in else ""
    text += f" ({row.line.file.rpartition('/')[2]}:{row.line.line})" if row.line else ""
    text += f" on {shorten(row.target, 80)}" if row.target else ""
    text += "" if row.child_pid is None else f" in its child process {row.child_pid}"
    return text + (f", waiting for {ranks(row.peers)}" if row.peers else "")


def _in_words(explanation: Explanation, diagnosis: Diagnosis, trouble: list[Trouble]) -> Finding:
    quotes = _quotes(explanation.facts)

    def adapt_to_job(sentence: str) -> str:
        sentence = sentence if diagnosis.counts_steps else without_steps(sentence, quotes)
        return with_coordinates(sentence, diagnosis.meshes)

    left_open = (_open_question(question, trouble) for question in explanation.open_questions)
    return explanation.to_finding(
        adapt_to_job(_claim(explanation, trouble)),
        _render(explanation.cause.value, "advice", _facts_of(explanation), trouble),
        tuple(adapt_to_job(sentence) for sentence in dict.fromkeys(left_open)),
    )


def _claim(explanation: Explanation, trouble: list[Trouble]) -> str:
    facts = _facts_of(explanation)
    claim = _render(explanation.cause.value, "claim", facts, trouble)
    claim += _render(SHARED, "parting", facts, trouble) if "parting" in facts else ""
    reason = explanation.reason
    return f"{claim}; {text_of(reason.value, 'as_reason')} ({reason.value})" if reason else claim


def _facts_of(explanation: Explanation) -> dict[str, object]:
    return _template_facts(
        explanation.cause.value, explanation.facts, explanation.ranks, explanation.place, explanation.step
    )


def _template_facts(
    code: str, facts: Mapping[str, object], ranks: tuple[int, ...], place: Place | None, step: int | None = None
) -> dict[str, object]:
    rank = ranks[0] if ranks else None
    return {**facts, "ranks": ranks, "rank": rank, "place": place, "step": step, "remedy": remedy(code)}


def _open_question(question: OpenQuestion, trouble: list[Trouble]) -> str:
    return _render(LEFT_OPEN, question.code, question.facts, trouble)


def _render(section: str, key: str, facts: Mapping[str, object], trouble: list[Trouble]) -> str:
    """Return a rendered template. If it fails, note the error and return the cause code and facts, or no advice."""
    try:
        return render_template(section, key, facts)
    except Exception as error:  # a filter may raise anything, and a missing sentence must not prevent the verdict
        trouble.append(Trouble(what=f"the {key} of {section}", why=f"{type(error).__name__}: {error}"))
        return "" if key == "advice" else _code_with_facts(key if section == LEFT_OPEN else section, facts)


def _code_with_facts(code: str, facts: Mapping[str, object]) -> str:
    """Return a cause code with its facts, such as "pipe_full (line=train.py:12)"."""
    known_facts = {name: value for name, value in facts.items() if name != "remedy" and value not in (None, "", ())}
    text = ", ".join(f"{name}={whole_place_name(v) if isinstance(v, Place) else v}" for name, v in known_facts.items())
    return f"{code} ({text})" if text else code


def nodes_note(evidence: Evidence) -> str:
    """Return a note on the nodes of a job, with the ranks and the clock of each."""
    nodes = list(dict.fromkeys(evidence.nodes[rank] for rank in sorted(evidence.nodes)))
    shown = []
    for node in nodes[:_MAX_NODES]:
        own_ranks = ranks([rank for rank, own in evidence.nodes.items() if own == node])
        clock = f"; {skew_text(evidence.clocks[node])}" if node in evidence.clocks else ""
        shown.append(f"{node} ({own_ranks}{clock})")
    more = f" and {len(nodes) - _MAX_NODES} more" if len(nodes) > _MAX_NODES else ""
    return f"observed by an agent on each of {len(nodes)} nodes: {', '.join(shown)}{more}"


def skew_text(skew: ClockSkew) -> str:
    """Return a phrase about a node's clock, compared with the clock of the first node."""
    if skew.error_s is None:
        return "its clock was not compared"
    if skew.clock_s is None or abs(skew.clock_s) <= max(skew.error_s, _MAX_SKEW_S):
        return f"its clock agrees within {max(skew.error_s, 0.001):.3f} s"
    ahead = "ahead" if skew.clock_s > 0 else "behind"
    return f"its clock is {abs(skew.clock_s):.3f} s {ahead} (± {skew.error_s:.3f} s), which was corrected"


_MAX_NODES, _MAX_SKEW_S = 8, 0.05
_MENTION = re.compile(r"\branks? (?:\d+(?:, \d+){0,3}(?: and \d+)?)(?![-\d]|\.\d)(?!, \d| and \d| \()")
_NUMBER = re.compile(r"\d+")
_STEP = re.compile(r",? (?:(?:in|of|since|after|to) )?step \d+\b|\b\d+ steps? done, ")


def with_coordinates(claim: str, places: Meshes) -> str:
    """Return the sentence `claim` with mesh coordinates after the first mention of each rank."""
    earlier_ranks: set[int] = set()

    def add_coordinates(number: re.Match[str]) -> str:
        rank = int(number[0])
        if rank in earlier_ranks or rank not in places:
            return number[0]
        earlier_ranks.add(rank)
        return located_rank(rank, places)

    return _MENTION.sub(lambda mention: _NUMBER.sub(add_coordinates, mention[0]), claim) if places else claim


def without_steps(claim: str, quotes: Sequence[str] = ()) -> str:
    """Return the sentence `claim` without step numbers. Texts of the program in it, the `quotes`, stay as they are."""
    for number, quote in enumerate(quotes):
        before, found, after = claim.partition(quote)
        if found:
            return without_steps(before, quotes[number + 1 :]) + quote + without_steps(after, quotes[number:])
    return _STEP.sub("", claim)


_QUOTE_LENGTHS = (200, 120, 80)  # to which the templates shorten what they quote


def _quotes(facts: object) -> list[str]:
    """Return the texts of the program among the facts, at any depth, as they may appear in a sentence."""
    match facts:
        case str() if _STEP.search(facts):
            return [facts, *(shorten(facts, length) for length in _QUOTE_LENGTHS)]
        case Mapping():
            return [text for value in facts.values() for text in _quotes(value)]
        case list() | tuple():
            return [text for value in facts for text in _quotes(value)]
    return []
