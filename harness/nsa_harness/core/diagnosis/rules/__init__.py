'''The rules: pure functions from a run to its cause, in the order in which they are asked.

A rule is a function `(context: DiagnosisContext) -> Explanation | None`. It works from a mechanism, never from the
texts of known programs, and it returns None if the run does not show that mechanism. How to add a rule:

1. **Row.** Give the cause its member of `Cause` in `causes.py`, and its section in `texts/causes.toml`. If no frozen
   evidence shows the cause, give facts for its template in `BY_HAND` of `tests/texts/test_templates.py`.
2. **Rule.** Write the function in the module of its family. If it needs something from the run first, let
   `@given(find)` pass that in: the rule is asked only if `find(context)` is not None.

       @given(standing(lambda root: root.kind is WaitKind.PIPE))
       def pipe_full(context: DiagnosisContext, root: Wait, ranks: tuple[int, ...]) -> Explanation:
           """A rank writes to a pipe that no process empties."""
           line = wait_place(context, root)
           return Explanation(
               cause=Cause.PIPE_FULL,
               evidence=EvidenceKind.KERNEL,  # what the rule goes by; the row says whether that makes it certain
               facts={"line": line, "child": None},
               ranks=ranks,
               place=line,  # of the culprit
               proof=dump_proof(context, root),
           )

3. **Facts.** They are values and never prose: numbers, strings that were read (a message, a function's name), `Place`,
   and tuples and mappings of these. No " at ", no "s" for a plural, nothing shortened or rounded. A rule passes every
   fact of its template each time it is asked: an unknown value is None, and an empty one is "" or (). If several rules
   name one cause, each passes a fact `variant`, a word that the template switches on, and the facts of its variant.
   A fact may not be called `ranks`, `rank`, `place`, `step` or `remedy`, which every template has already. Readers see
   the facts under `facts` of the finding in report.json, so choose names that they understand.
4. **Template.** `claim` in the cause's section of `texts/causes.toml` is the sentence, in Jinja2 with `if` and filters
   only, and `advice` is what to do; without `advice` the `remedy` is shown. Line breaks and indentation count as one
   space; `{%- if child %}` takes the space before it away. In addition to the facts a template has

       ranks, rank   the ranks of the explanation, and the first of them (None where there is none)
       place, step   those of the explanation
       remedy        that of the section, as a sentence

   and the filters of `texts/words.py`:

       {{ ranks|ranks }}               rank 1; ranks 0, 2; ranks 0-511 and 3 more
       {{ "waits"|agree(ranks) }}      waits for one rank, wait for several; also for "is", "does", and for a number
       {{ line|at }}                   " at own/train.py:12" with its leading space; "" for None
       {{ function|inside }}           " in step"; "" for ""
       {{ seen|counted("step") }}      1 step, 3 steps; a second argument is the plural
       {{ message|shorten(120) }}      one line of at most so many characters
       {{ kept|bytes }}                1.5 GiB
       {{ quiet_s|fixed(0) }}          a number with so many decimals; `general` is Python's "g"
       {{ child|process }}             4711 (python worker.py), of the facts that `process_facts` returns
       {{ child.blocked_in|child_wait }}   a read or write: the words of [child_wait] in causes.toml
       {{ step|in_step }}              " in step 3"; "" for None; `of_step` likewise
       {{ names|first_few(count) }}    a, b, c and 2 more
       {{ own|call }}                  all_reduce #13 of group tp at own/train.py:30, of `call_facts`
       {{ entered|callers }}           rank 0 called all_reduce #6, ranks 1, 2 called barrier #6, of `ranks_by_facts`
       {{ sizes|on_ranks("{n} B") }}   4 B on rank 0, 2 B on ranks 1, 2, of `ranks_by_facts`

   If several causes share their claims, these are in `[shared]` by variant, and each cause has `{% include variant %}`.
   Whatever else words a value becomes a filter there, and never code in a rule. A fact that is missing, and None where
   it is printed, are errors: the report then shows the cause with its facts, and notes the error among what could not
   be captured. So print an optional fact within `{% if %}` only.
5. **Order.** Enter the rule in `RULES` below. The first answer is the cause.
6. **Fault.** Show it by a program in tests/faults with a healthy twin (`shown_by` in the row), and write tests in
   tests/core that the rule answers, and that something else explains the run.

No rule changes a verdict: `core/verdict/proof.py` decides what is a HANG. A mechanism that only stacks show is read in
`core/evidence/stacks.py` and kept in a field of `Wait`.

`python tests/frozen/freeze.py` shows which frozen judgements a change touches, and tests/texts renders every template
with and without each optional fact.

What the evidence leaves open besides is an `OpenQuestion(code=..., facts={...})` in `left_open=`; its code is a key of
`[left_open]` in `texts/causes.toml`, with a template of the same kind.
'''

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from nsa_harness.core.diagnosis.explanation import Rule
from nsa_harness.core.diagnosis.rules import (
    autograd,
    calls_differ,
    failures,
    group_waits,
    host_waits,
    p2p,
    resources,
    silent_faults,
    threads,
)


class RulePhase(StrEnum):
    """The phases in their order: those that look for the cause, and then those that are noted beside any verdict."""

    NOT_JUDGED = "not judged"
    FIRST_FAILURE = "first failure in time"  # a failure that says why: the waits for that rank follow from it
    WAIT_CYCLE = "wait cycle outside collectives"  # groups and transfers, which change what ranks call afterwards
    RANKS_DIFFER = "ranks differ"
    WAITS_BY_ITSELF = "a rank waits by itself"
    SLOW = "slow"
    FALLBACK = "fallback"  # how the first rank ended: late, because ranks that diverge end each other
    TRAINING = "silent faults of the training"
    PROGRAM = "what the program's own tables show"
    SURROUNDINGS = "silent faults around the training"


NOTED = (RulePhase.TRAINING, RulePhase.PROGRAM, RulePhase.SURROUNDINGS)
CAUSES = tuple(phase for phase in RulePhase if phase not in NOTED)

# The order within a phase decides where two rules answer one run: the one that says more, or explains the other,
# comes first.
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
        resources.infra,
        autograd.unused_params,
        resources.dataloader_worker_died,
        failures.exception,
    ),
    RulePhase.WAIT_CYCLE: (
        group_waits.rendezvous_missing_rank,
        p2p.p2p_unmatched,
        group_waits.group_creation_subset,
        group_waits.store_key_missing,
    ),
    RulePhase.RANKS_DIFFER: (calls_differ.cross_group_deadlock, calls_differ.calls_differ),
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
        host_waits.blocked_io,
        group_waits.transport,
    ),
    RulePhase.SLOW: (failures.slow,),
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
        silent_faults.replica_divergence,
        autograd.silent_checkpoint,
        silent_faults.no_gradient,
        silent_faults.memory_growth,
        silent_faults.input_bound,
    ),
    RulePhase.PROGRAM: (),  # passed in, with the program
    RulePhase.SURROUNDINGS: (
        resources.idle_device,
        silent_faults.dirty_exit,
        failures.orphan_process,
        failures.retracted_hang,
        autograd.find_unused_needless,
        autograd.gradient_order_differs,
    ),
}
