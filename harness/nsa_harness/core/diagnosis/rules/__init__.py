'''Rules: pure functions that explain a run, and the order in which the diagnosis calls them.

A rule is a function `(context: DiagnosisContext) -> Explanation | None`. It recognizes one mechanism and returns None
if the run does not show it. A rule must not look for the texts of known programs. To add a rule:

1. **Table row.** Add the cause to `Cause` in `causes.py`, and add a section for it to `texts/causes.toml`. If no frozen
   evidence in tests/frozen shows the cause, add example facts to `BY_HAND` in `tests/texts/test_templates.py`.
2. **Rule.** Write the function in the module that fits the cause, and start its docstring with "Explain a hang in
   which" or "Explain a failure in which" ("Report" if its finding can accompany a PASS). If the rule needs something
   that only some runs have, find it with `@rule_if(find)`. The rule then runs only if `find(context)` is not None, and
   receives the values that `find` returned.

       @rule_if(root_where(lambda root: root.kind is WaitKind.PIPE))
       def pipe_full(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation:
           """Explain a hang in which a rank writes to a full pipe that no process reads."""
           line = wait_place(context, root)
           return Explanation(
               cause=Cause.PIPE_FULL,
               evidence=EvidenceKind.KERNEL,  # kind of evidence; the table row says whether it proves the cause
               facts={"line": line, "child": None},
               ranks=ranks,
               place=line,  # the culprit's line, where the fix belongs
               proof=dump_proof(context, root),
           )

3. **Facts.** Facts are values, never text for people: numbers, strings from the run (a message, a function name),
   `Place`, and tuples and mappings of these. Do not shorten or round them, and do not add words such as " at ". A rule
   passes every fact that its template uses, even if the value is unknown (None) or empty ("" or ()). If several rules
   name the same cause, each passes a fact `variant`, which selects the text in the template. The names `ranks`, `rank`,
   `place`, `step` and `remedy` are reserved, because every template has them. report.json contains the facts, so
   choose names that its readers understand.
4. **Template.** In the cause's section of `texts/causes.toml`, `claim` is the sentence that the report shows and
   `advice` tells the user what to do. Without `advice`, the report shows `remedy`. Both are Jinja2 templates that use
   only `if` and filters. Line breaks and indentation become one space; `{%- if child %}` removes the space before it.
   In addition to the facts, a template has these values:

       ranks, rank   the ranks of the explanation, and the first of them (None if there are none)
       place, step   the place and step of the explanation
       remedy        the `remedy` of the section, as a sentence

   Templates may use the filters in `texts/template_filters.py`, for example:

       {{ ranks|ranks }}               rank 1; ranks 0, 2; ranks 0-511 and 3 more
       {{ "waits"|agree(ranks) }}      "waits" for one rank, "wait" for several; also accepts a number
       {{ line|located }}              " (own/train.py:12)" with its leading space; "" for None
       {{ function|inside }}           " in step"; "" for ""
       {{ count|counted("step") }}     1 step; 3 steps; a second argument gives an irregular plural
       {{ message|shorten(120) }}      one line of at most 120 characters
       {{ size|bytes }}                1.5 GiB
       {{ duration_s|fixed(0) }}       a number without decimals; `general` formats like Python's "g"
       {{ child|process }}             4711 (python worker.py), for facts from `process_facts`
       {{ child.blocked_in|child_wait }}   what a blocked child does, from [child_wait] in causes.toml
       {{ step|in_step }}              " in step 3"; "" for None; `of_step` gives " of step 3"
       {{ names|first_few(count) }}    a, b, c and 2 more
       {{ own_call|call }}             all_reduce #13 of group tp (own/train.py:30), for facts from `call_facts`
       {{ entered|callers }}           rank 0 called all_reduce #6 and ranks 1, 2 called barrier #6
       {{ sizes|on_ranks("{n} B") }}   4 B on rank 0, 2 B on ranks 1, 2, for facts from `ranks_by_facts`

   If several causes have the same claims, put each claim under its variant in `[shared]`, and write
   `{% include variant %}` in each cause. If a value needs another wording, add a filter; a rule never formats text. A
   template that uses a missing fact or prints None fails: the report then shows the cause with its bare facts and lists
   the error under "not captured". So print an optional fact only inside `{% if %}`.
5. **Order.** Add the rule to `RULES` below. The first rule that explains a run names its cause.
6. **Tests.** Add a program with this fault to tests/faults, with a twin without it, or list in
   tests/core/test_causes.py what shows the cause instead. In tests/core, test a run that the rule explains and a
   similar run that it must not explain.

A rule never changes a verdict: `core/verdict/proof.py` alone decides whether a run hangs. If only stacks show a
mechanism, recognize it in `core/evidence/stacks.py` and store it in a field of `Wait`.

`python tests/frozen/freeze.py` shows which stored judgements a change affects. tests/texts renders every template with
and without each optional fact.

If the evidence leaves a question open, pass an `OpenQuestion(code=..., facts={...})` in `left_open=`. Its code is a key
of `[left_open]` in `texts/causes.toml`, whose value is a template too.
'''

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from nsa_harness.core.diagnosis.explanation import Rule
from nsa_harness.core.diagnosis.rules import (
    autograd,
    calls_differ,
    failures,
    frameworks,
    group_waits,
    host_waits,
    network,
    p2p,
    recomputation,
    replicas,
    resources,
    rpc,
    silent_faults,
    slow_runs,
    stragglers,
    threads,
)


class RulePhase(StrEnum):
    """The phases of a diagnosis in their order. The last three add findings to any verdict, even a PASS."""

    NOT_JUDGED = "not judged"
    FIRST_FAILURE = "first failure in time"  # it shows its reason itself; other ranks wait for the failed rank
    WAIT_CYCLE = "wait cycle outside collectives"  # before RANKS_DIFFER, because such waits make later calls differ
    RANKS_DIFFER = "ranks differ"
    WAITS_BY_ITSELF = "a rank waits by itself"
    SLOW = "slow"
    FALLBACK = "fallback"  # only how the first rank ended; last, because ranks that diverge make each other fail
    TRAINING = "silent faults of the training"
    PROGRAM = "what the program's own tables show"
    SURROUNDINGS = "silent faults around the training"


NOTED = (RulePhase.TRAINING, RulePhase.PROGRAM, RulePhase.SURROUNDINGS)
CAUSES = tuple(phase for phase in RulePhase if phase not in NOTED)

# If two rules of a phase explain the same run, the first one names the cause. So the rule that shows more, or that
# explains the other, comes first.
RULES: Mapping[RulePhase, tuple[Rule, ...]] = {
    RulePhase.NOT_JUDGED: (failures.not_judged,),
    RulePhase.FIRST_FAILURE: (
        autograd.static_graph_changed,
        autograd.ready_twice,
        autograd.checkpoint_recompute_mismatch,
        autograd.inplace_modification,
        autograd.model_mismatch,
        autograd.reentrant_no_grad_input,
        autograd.nothing_to_differentiate,
        failures.came_too_late,
        group_waits.store_given_up,
        resources.host_oom,
        resources.cuda_oom,
        resources.cuda_assert,
        resources.disk_full,
        autograd.rank_conditional_unused_params,
        network.unreachable,
        network.loopback,
        resources.infra,
        resources.hidden_package,
        autograd.unused_params,
        resources.dataloader_worker_died,
        failures.exception,
    ),
    RulePhase.WAIT_CYCLE: (
        group_waits.rendezvous_missing_rank,
        p2p.p2p_unmatched,
        group_waits.group_creation_subset,
        group_waits.store_key_missing,
        rpc.rpc_deadlock,
    ),
    RulePhase.RANKS_DIFFER: (
        recomputation.recomputed_collective,
        calls_differ.cross_group_deadlock,
        calls_differ.calls_differ,
        calls_differ.calls_of_two_threads,
    ),
    RulePhase.WAITS_BY_ITSELF: (
        host_waits.stopped_process,
        host_waits.debugger_waits,
        threads.gil_held_native,
        threads.native_busy_loop,
        resources.shutdown_hang,
        threads.thread_died,
        host_waits.dataloader_worker_blocked,
        host_waits.fork_lock,
        host_waits.pipe_full,
        host_waits.backward_function_blocked,
        host_waits.lock_cycle,
        host_waits.infinite_loop,
        threads.pool_worker_lost,
        threads.open_thread_wait,
        threads.livelock,
        host_waits.starved,
        host_waits.child_waits,
        host_waits.blocked_io,
        group_waits.transport,
    ),
    RulePhase.SLOW: (slow_runs.slow,),
    RulePhase.FALLBACK: (
        failures.never_arrived,
        failures.rank_absent,
        failures.not_delivered,
        failures.early_exit,
        failures.bad_exit,
        failures.killed,
        failures.crashed,
        failures.unknown,
    ),
    RulePhase.TRAINING: (
        silent_faults.shared_file,
        silent_faults.unwaited_collective,
        silent_faults.batches_given_up,
        silent_faults.uninitialised_parameters,
        silent_faults.nan,
        replicas.replica_divergence,
        autograd.silent_checkpoint,
        silent_faults.no_gradient,
        silent_faults.memory_growth,
        silent_faults.input_bound,
        stragglers.straggler,
        network.slow_link,
    ),
    RulePhase.PROGRAM: (),  # `diagnose` receives the rules that come with the program
    RulePhase.SURROUNDINGS: (
        frameworks.framework_phase,
        resources.gpu_fault,
        resources.idle_device,
        silent_faults.dirty_exit,
        failures.orphan_process,
        failures.retracted_hang,
        autograd.find_unused_needless,
        autograd.gradient_order_differs,
    ),
}
