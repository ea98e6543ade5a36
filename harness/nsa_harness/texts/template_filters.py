"""Filters for the templates in causes.toml, each of which formats a fact as part of a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any

from nsa_harness.core.outcome.wording import location, location_in_brackets, number_of, of_group, shorten
from nsa_harness.texts.causes import sections
from nsa_harness.texts.words import listing, ranks, ranks_by_text, verb_for

_GIB, _MIB = 1 << 30, 1 << 20


def gibibytes(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"


def binary_size(size_bytes: float) -> str:
    """Return the size as text, such as "9.1 GiB", "1.4 MiB" or "12.0 KiB"."""
    if size_bytes >= _GIB:
        return gibibytes(size_bytes)
    return f"{size_bytes / _MIB:.1f} MiB" if size_bytes >= _MIB / 10 else f"{size_bytes / 1024:.1f} KiB"


def in_function(function: str) -> str:
    """Return " in NAME" for a function, or "" for code outside functions."""
    return "" if function in ("", "<module>") else f" in {function}"


def error_text(error: str) -> str:
    """Return the message of an exception without a trailing colon, cut to 200 characters."""
    return shorten(error.rstrip(": "))


def in_step(step: int | None) -> str:
    """Return " in step 3" for step 3, or "" for None."""
    return "" if step is None else f" in step {step}"


def of_step(step: int | None) -> str:
    """Return " of step 3" for step 3, or "" for None."""
    return "" if step is None else f" of step {step}"


def child_wait(kind: str) -> str:
    """Return a phrase that says what a child process waits for."""
    waits = sections()["child_wait"]
    return waits.get(kind, waits["unknown"])


def child_process(child: Mapping[str, Any]) -> str:
    """Return the process ID and command of a child process, such as "4711 (python worker.py)"."""
    return f"{child['pid']} ({shorten(child['command'], 60)})"


# States of a rank that are no calls, by their name in core/verdict/wait_graph.py.
_NOT_BLOCKED = {"has left": "has exited", "stopped by a signal": "is stopped by a signal"}


def blocked_rank(wait: Mapping[str, Any]) -> str:
    """Describe where one rank is blocked, such as "rank 1 is blocked in all_reduce #13 (train.py:12)"."""
    if wait["blocked_in"] in _NOT_BLOCKED:
        return f"rank {wait['rank']} {_NOT_BLOCKED[wait['blocked_in']]}{location_in_brackets(wait.get('line'))}"
    half = wait.get("transfer")
    call = f"{half['op']} {'to' if half['sends'] else 'from'} {ranks(half['peers'])}" if half else wait["blocked_in"]
    return f"rank {wait['rank']} is blocked in {call}{location_in_brackets(wait.get('line'))}"


def blocked_ranks(wait: Mapping[str, Any] | None) -> str:
    """Return a text such as "; ranks 0, 2 are blocked in all_reduce (own/train.py:18)", or "" if `wait` is None."""
    if wait is None:
        return ""
    call = f"{wait['blocked_in'] or 'calls to other ranks'}{location_in_brackets(wait['line'])}"
    return f"; {ranks(wait['ranks'])} {verb_for('is', wait['ranks'])} blocked in {call}"


def operation(call: Mapping[str, Any]) -> str:
    """Return the name of a collective call, such as "all_reduce #13 of group tp"."""
    number = "" if call["number"] is None else f" #{call['number']}"
    return f"{call['op']}{number}{of_group(call['group'])}"


def located_call(call: Mapping[str, Any], step: int | None = None) -> str:
    """Return a collective call with its location, such as "all_reduce #13 (own/train.py:30, step 3)"."""
    return f"{operation(call)}{location_in_brackets(call['line'], step)}"


def common_call(calls: Sequence[Mapping[str, Any]], step: int | None = None) -> str:
    """Return the collective that all ranks called, with its location if that is the same for all."""
    call, *other_calls = calls
    line = call["line"] if all(other["line"] == call["line"] for other in other_calls) else None
    return located_call({**call, "line": line}, step)


def callers(calls: Sequence[Mapping[str, Any]], ranks: Sequence[int] | None = None) -> str:
    """Return which rank called what, such as "rank 0 called all_reduce #6", for all calls or those of `ranks`."""
    texts = [(rank, located_call(call)) for call in calls for rank in call["ranks"] if ranks is None or rank in ranks]
    return listing([f"{names} called {text}" for names, text in ranks_by_text(texts)])


def in_functions(positions: Sequence[Mapping[str, Any]]) -> str:
    """Return which ranks are in which function: "rank 0 is in Loop.advance (loop.py:9) and rank 1 is in ..."."""
    return listing(
        [
            f"{ranks(position['ranks'])} {verb_for('is', position['ranks'])} in {position['function']}"
            f"{location_in_brackets(position['line'])}"
            for position in positions
        ]
    )


def last_functions(callbacks: Sequence[Mapping[str, Any]]) -> str:
    """Return functions with their lines, and on which ranks: "training_step (train.py:13) on ranks 0, 1"."""
    functions = [
        (one["function"] or "a function", location_in_brackets(one["line"]), one["ranks"]) for one in callbacks
    ]
    return listing([f"{function}{line} on {ranks(on_ranks)}" for function, line, on_ranks in functions])


def living_at(thread: Mapping[str, Any]) -> str:
    """Return where a living thread is: " and waits in Queue.get (train.py:5)" or " (train.py:5)"."""
    return (f" and waits in {thread['call']}" if thread["call"] else "") + location_in_brackets(thread["line"])


def rpc_callers(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return which ranks wait in which remote call: "ranks 0, 1 wait for an answer in rpc_sync (train.py:8)"."""
    texts = [
        f"{ranks(call['ranks'])} {verb_for('waits', call['ranks'])} for an answer in {call['call']}"
        f"{location_in_brackets(call['line'])}"
        for call in calls
    ]
    return listing(texts)


def rpc_handlers(handlers: Sequence[Mapping[str, Any]]) -> str:
    """Return what the functions that serve remote calls wait for, on which ranks."""
    return listing([f"on {ranks(handler['ranks'])}, {_rpc_handler(handler)}" for handler in handlers])


def _rpc_handler(handler: Mapping[str, Any]) -> str:
    line = location_in_brackets(handler["line"])
    if handler["calls"]:
        return f"{handler['function']} serves a remote call and waits in {handler['calls']} itself{line}"
    text = f"{handler['function']} serves a remote call and waits for a lock{line}"
    if handler["lock_taken_at"] is None:
        return text
    owner = f"thread {handler['thread']}" if handler["thread"] else "training thread"
    return f"{text}, which the {owner} took{location_in_brackets(handler['lock_taken_at'])} before its own remote call"


_MAX_CYCLE_LINKS = 4  # waits that a sentence lists; the others are only counted


def wait_cycle(waits: Sequence[Mapping[str, Any]]) -> str:
    """Describe a cycle of waits, such as "rank 0 waits for rank 1 in all_reduce #3 of group tp, rank 1 waits ..."."""
    texts = []
    for link in waits[:_MAX_CYCLE_LINKS]:
        never = ", which never called a collective of that group" if link["never_entered"] else ""
        of_default = " of the default group" if link["call"]["group"] == "0" else ""
        call = f"{operation(link['call'])}{of_default}{location_in_brackets(link['call']['line'])}"
        texts.append(f"rank {link['rank']} waits for rank {link['waits_for']} in {call}{never}")
    return first_few(texts, len(waits), most=_MAX_CYCLE_LINKS)


def on_ranks(values: Sequence[Mapping[str, Any]], *patterns: str) -> str:
    """Return values grouped by rank, such as "4 elements on rank 0, 1 element on rank 1".

    `values` is the result of `ranks_by_facts`. `patterns` are texts such as "{value} element{plural}" that contain
    names of facts. Each value uses the first pattern for which it has all facts, or else the last pattern. `{own_line}`
    becomes " (own/train.py:12)" if the lines of the values differ, and otherwise "". `{plural}` becomes "s" unless the
    fact `value` is 1.
    """
    lines_differ = any(value.get("line") != values[0].get("line") for value in values)
    own_lines = [location_in_brackets(value.get("line")) if lines_differ else "" for value in values]
    texts = [
        (
            rank,
            _fill_pattern(patterns, {**value, "own_line": own_line, "plural": "" if value.get("value") == 1 else "s"}),
        )
        for value, own_line in zip(values, own_lines, strict=True)
        for rank in value["ranks"]
    ]
    return ", ".join(f"{text} on {names}" for names, text in ranks_by_text(texts))


def _fill_pattern(patterns: Sequence[str], facts: Mapping[str, Any]) -> str:
    """Fill in the first pattern for which all facts are known, or else the last pattern."""
    *earlier, last = patterns
    for pattern in earlier:
        if all(name is None or name in facts for _, name, _, _ in Formatter().parse(pattern)):
            return pattern.format(**facts)
    return last.format(**facts)


def last_progress(event: Mapping[str, Any]) -> str:
    """Return a rank's last progress event as text, such as "forward blocks.0, step 3"."""
    if "unseen" in event:
        return sections()["unseen"][event["unseen"]]
    name = f" {event['name']}" if event["name"] else ""
    return f"; last progress event: {event['in']}{name}, step {event['step']}"


def last_line(sample: Mapping[str, Any] | None) -> str:
    """Return a text such as "; 0.25 s before its end it was at own/train.py:12", or "" if `sample` is None."""
    if sample is None:
        return ""
    return f"; {sample['before_end_s']:.2f} s before its end it was at {location(sample['line'])}"


_SHORT_S = 0.1  # shorter steps are shown in milliseconds


def pace(speed: Mapping[str, Any], elapsed_s: float | None = None) -> str:
    """Describe a speed, such as "3 steps done, 4.0 s per step, at this rate all 8 would end after 65 s"."""
    text, step_s = f"{number_of(speed['steps_done'], 'step')} done", speed["step_s"]
    if step_s is not None:
        text += f", {step_s * 1000:.1f} ms per step" if step_s < _SHORT_S else f", {step_s:.1f} s per step"
    if speed["left_s"] is not None and elapsed_s is not None:
        text += f", at this rate all {speed['steps_planned']} would end after {elapsed_s + speed['left_s']:.0f} s"
    elif speed["left_s"] is not None:
        text += f", {speed['left_s']:.0f} s more for all {speed['steps_planned']}"
    elif elapsed_s is not None:
        text += ", too few to tell when it would end" if step_s is None else ""
    return text


def hot_part(part: Mapping[str, Any]) -> str:
    """Describe the share of stack samples in one part of the program, such as "90 % in step (own/train.py:12)"."""
    loop = "" if part["loop_line"] is None else f", in the loop at line {part['loop_line']}"
    return f"{100 * part['samples'] // part['of']} % in {part['function']}{location_in_brackets(part['line'])}{loop}"


def refused_resource(code: str) -> str:
    """Return a clause that explains the error code for a refused resource."""
    return sections()["refused"][code]


def attempts_on_line(end: Mapping[str, Any]) -> str:
    """Describe the attempts that ended on the same line, such as "2 hang at own/train.py:12"."""
    return f"{end['count']} {verb_for(end['verb'], end['count'])} at {location(end['line'])}"


def what_follows(change: str, ending: str) -> str:
    """Describe what follows if a diagnostic rerun with `change` ended with `ending`, or return ""."""
    text = sections()["what_follows"].get(f"{change}, {ending}")
    return f", {text}" if text else ""


def gpu_faults(gpu: Mapping[str, Any]) -> str:
    """Return a GPU with its node, its ranks and its faults, such as "GPU 3 of node7 (rank 3) reported Xid 48"."""
    name = f"the GPU at {gpu['bus']}" if gpu["index"] < 0 else f"GPU {gpu['index']}"
    phrases = [f"reported Xid {shorten(error, 100)}" for error in gpu["errors"][:_MAX_GPU_ERRORS]]
    if gpu["ecc_errors"]:
        phrases.append(f"has {number_of(gpu['ecc_errors'], 'uncorrected memory error')} since its driver was loaded")
    if gpu["needs_reset"]:
        phrases.append("has defective memory that is only replaced at its next reset")
    if gpu["has_failed_repair"]:
        phrases.append("has defective memory that could not be replaced")
    phrases += [_SLOWDOWNS[slowdown] for slowdown in gpu["slowdowns"]]
    if gpu["lanes"]:
        phrases.append("uses only {} of the {} lanes of its PCIe connection".format(*gpu["lanes"]))
    users = f" ({ranks(gpu['ranks'])})" if gpu["ranks"] else ""
    return f"{name} of {gpu['node']}{users} {listing(phrases)}"


_MAX_GPU_ERRORS = 3
_SLOWDOWNS = {
    "thermal": "runs more slowly because it is too hot",
    "power brake": "runs more slowly because its power supply demands it",
}


def gpu_use(gpu: Mapping[str, Any]) -> str:
    """Describe the load of a GPU, such as "GPU 1 is at 97 % with 512 MiB in use"."""
    return f"GPU {gpu['index']} is at {100 * gpu['utilisation']:.0f} % with {gpu['used_bytes'] >> 20} MiB in use"


def missing_on_rank(trace: Mapping[str, Any]) -> str:
    """Return the number of parameters without a gradient, such as "2 on rank 1"."""
    return f"{trace['missing']} on rank {trace['rank']}"


def first_few(names: Sequence[str], count: int | None = None, *, most: int = 3, of: str = "") -> str:
    """Return a text such as "a, b, c and 2 more". `count`: how many there are. `of`: a text after "more"."""
    count = len(names) if count is None else count
    return ", ".join(names[:most]) + (f" and {count - most} more{of}" if count > most else "")


def parameter_names(names: Sequence[str]) -> str:
    """Return the parameter names as text, such as "a.weight" or "2 parameters (a.weight, a.bias)"."""
    if not names:
        return "some of its parameters"
    return f"{number_of(len(names), 'parameter')} ({first_few(names)})" if len(names) > 1 else names[0]


# The filters that templates may apply to a fact.
FILTERS: dict[str, Callable[..., str]] = {
    "agree": verb_for,
    "blocked": blocked_ranks,
    "bytes": binary_size,
    "call": located_call,
    "callers": callers,
    "child_wait": child_wait,
    "common_call": common_call,
    "counted": number_of,
    "ended_there": attempts_on_line,
    "error_text": error_text,
    "first_few": first_few,
    "fixed": lambda value, decimals: f"{value:.{decimals}f}",
    "general": lambda value, digits=6: f"{value:.{digits}g}",
    "gib": gibibytes,
    "gpu": gpu_use,
    "gpu_faults": gpu_faults,
    "hot_part": hot_part,
    "in_functions": in_functions,
    "in_step": in_step,
    "inside": in_function,
    "last_functions": last_functions,
    "last_line": last_line,
    "last_progress": last_progress,
    "living_at": living_at,
    "located": location_in_brackets,
    "location": location,
    "missing_gradients": missing_on_rank,
    "of_group": of_group,
    "of_step": of_step,
    "on_ranks": on_ranks,
    "operation": operation,
    "pace": pace,
    "parameter_names": parameter_names,
    "process": child_process,
    "ranks": ranks,
    "refused": refused_resource,
    "rpc_callers": rpc_callers,
    "rpc_handlers": rpc_handlers,
    "shorten": shorten,
    "wait": blocked_rank,
    "wait_cycle": wait_cycle,
    "what_follows": what_follows,
}
