"""Prepares a launch and a command line for each configuration of a bisection."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from nsa_harness import __version__
from nsa_harness.core.experiment.statistics import control_runs
from nsa_harness.core.experiment.trial import BASELINE_RUNS, FAILED_STATUSES, SLOW, SoughtFailure
from nsa_harness.core.plan import EngineChoice, RunSpec, Skip
from nsa_harness.core.report import MachineFacts, Status
from nsa_harness.core.scenario.overrides import is_override
from nsa_harness.core.scenario.yaml_tree import Plain, value_text
from nsa_harness.core.search.question import QuestionKind, SearchQuestion, Spans, spans_of
from nsa_harness.core.search.subject import SEED, Subject, SubjectForm
from nsa_harness.core.search.waits import proof_after_s, stall_after_s
from nsa_harness.errors import HarnessError, UsageError, did_you_mean
from nsa_harness.protocol import ENV_PREFIX
from nsa_harness.subject.environment import is_read_by_program
from nsa_harness.supervisor.experiments.cache_key import (
    LAUNCH_ENTRY,
    CacheKey,
    LaunchedProgram,
    query_interpreter_of,
    sealed_digest,
)
from nsa_harness.supervisor.experiments.intermediate_configs import Mixtures, Worktrees, digest, mixed_text
from nsa_harness.supervisor.launch.planning import Invocation, plan_launches, spec_in_checkout
from nsa_harness.supervisor.storage.rundir import RunOptions, StoredResult, earlier_results

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")
# Set in front of a command, these also affect the harness, its Python or the loader, or do not reach the program.
_HARNESS_VARIABLE = re.compile(
    r"PYTHON.*|LD_.*|MALLOC_.*|GITHUB_.*|LC_.*|LANG|PATH|HOME|TMPDIR|VIRTUAL_ENV|CUDA_VISIBLE_DEVICES|TERM|CI"
    r"|NO_COLOR|COLUMNS|LINES|SLURM_.*"
)
PLACEHOLDERS = {
    SubjectForm.LAYERS: ("layers", "items", "range"),
    SubjectForm.VALUE: ("value",),
    SubjectForm.WORDS: ("value",),
    SubjectForm.CHOICE: ("value",),
    SubjectForm.FILE: ("file",),
}


class CannotLaunchError(HarnessError):
    """Raised if a configuration is invalid, or if this machine lacks something that it requires."""


@dataclass(frozen=True, kw_only=True)
class Templates:
    """Command-line arguments and variables with placeholders, such as "--layers={value}"."""

    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    note: str = ""  # which templates were dropped, and why

    def __bool__(self) -> bool:
        return bool(self.args or self.env)

    def checked_for(self, subject: Subject) -> Templates:
        """Return those templates that can be used for the subject. Raise UsageError if one does not fit it."""
        if not self and not subject.is_declared:
            raise UsageError(
                f"{subject.key}: how does the program get the value? Add --arg TEXT or --env-arg NAME=TEXT"
            )
        allowed = PLACEHOLDERS.get(subject.form, ())
        for text in self._texts:
            names = _PLACEHOLDER.findall(text)
            unknown = next((name for name in names if name not in allowed), None)
            if unknown is None and names:
                continue
            choice = " or ".join(f"{{{name}}}" for name in allowed) or "none, because keys of a scenario are varied"
            problem = f"{{{unknown}}} cannot be filled in" if unknown else "it has no placeholder"
            raise UsageError(
                f"{value_text(text)}: {problem}{did_you_mean(unknown or '', allowed)}; possible placeholders: {choice}"
            )
        return self._without_ranges()

    @property
    def takes_range(self) -> bool:
        """Whether the templates can only pass consecutive items, because they contain {range}."""
        return any("range" in names for names in map(_placeholder_names, self._texts))

    @property
    def _texts(self) -> tuple[str, ...]:
        return (*self.args, *(value for _, value in self.env))

    def _without_ranges(self) -> Templates:
        """Return only the templates that can express any subset of the items, or all templates if none can."""
        names_of_texts = [_placeholder_names(text) for text in self._texts]
        list_names = next((names for names in names_of_texts if names in ({"layers"}, {"items"})), None)
        if list_names is None or {*list_names, "range"} in names_of_texts or {"range"} not in names_of_texts:
            return self
        return Templates(
            args=tuple(text for text in self.args if _placeholder_names(text) != {"range"}),
            env=tuple((name, text) for name, text in self.env if _placeholder_names(text) != {"range"}),
            note=f"{{{min(list_names)}}} says any choice of layers, so what has {{range}} in it is left out",
        )

    def fill(self, subject: Subject, subset: Collection[int], file: str = "") -> Templates:
        """Return the templates filled in for `subset`. `file` is the path of its config file."""
        if not self:
            return self
        value = file if subject.form is SubjectForm.FILE else subject.config(subset)[subject.key]
        list_text = ",".join(map(str, value)) if isinstance(value, list) else str(value)

        def fill(text: str) -> str:
            return _PLACEHOLDER.sub(lambda match: _range_text(value) if match[1] == "range" else list_text, text)

        return replace(self, args=tuple(map(fill, self.args)), env=tuple((name, fill(text)) for name, text in self.env))


@dataclass(kw_only=True)
class Launches:
    """Creates the launch and the command line for the subset of items that a configuration takes from the bad end."""

    request: BisectRequest
    facts: MachineFacts
    trees: Worktrees | None = None  # only in a bisection over commits
    longest_quiet_s: float | None = None  # longest time without progress in the good run, or None if unknown so far
    mixtures: Mixtures | None = None  # None if no files must be written, because only a plan is shown
    specs: dict[Spans, RunSpec | str] = field(default_factory=dict)  # the launch, or the reason why there is none

    def __post_init__(self) -> None:
        self.question, self.subject = self.request.question, self.request.subject

    def use_worktrees(self, trees: Worktrees) -> None:
        """Use a separate checkout for each commit, created by `trees`."""
        self.trees = trees
        self.specs.clear()

    def use_mixtures(self, mixtures: Mixtures) -> None:
        """Use `mixtures` to write the mixed config files and environments of intermediate configurations."""
        self.mixtures = mixtures
        self.specs.clear()

    def spec(self, subset: Collection[int]) -> RunSpec:
        """Return the launch for a subset of the items. Raise CannotLaunchError if it cannot be launched."""
        spec = self.spec_or_reason(subset)
        if isinstance(spec, str):
            raise CannotLaunchError(spec)
        return spec

    def spec_or_reason(self, subset: Collection[int]) -> RunSpec | str:
        """Return the launch for a subset of the items, or the reason why it cannot be launched."""
        key = spans_of(subset)
        if key not in self.specs:
            try:
                self.specs[key] = self._make_spec(subset)
            except HarnessError as error:
                self.specs[key] = str(error)
        return self.specs[key]

    def ends(self) -> list[RunSpec | str]:
        """Return, for the good and the bad configuration, the launch or the reason why it cannot be launched."""
        return [self.spec_or_reason(subset) for subset in ((), range(len(self.subject.items)))]

    def with_learned_limits(self, spec: RunSpec, *, in_full: bool) -> RunSpec:
        """Return the spec with time limits derived from the known-good configuration's runs, unless the scenario sets
        them.

        `in_full`: only with the limits that the printed command also sets.
        """
        quiet_s, limits = self.longest_quiet_s, spec.limits
        if quiet_s is None:
            return spec
        stall_s = limits.stall_s if in_full or limits.stall_s is not None else stall_after_s(quiet_s)
        open_wait_s = proof_after_s(quiet_s) if limits.open_wait_s is None else limits.open_wait_s
        return replace(spec, limits=replace(limits, stall_s=stall_s, open_wait_s=open_wait_s))

    def hashes(self, subset: Collection[int]) -> frozenset[str]:
        """Return the hashes under which earlier runs of `subset` could be stored, by bisect or by `run`."""
        is_not_typed = self.subject.form in (SubjectForm.COMMIT, SubjectForm.FILE) or self.subject.packages(subset)
        try:
            typed_specs = () if is_not_typed else plan_launches(self._invocation(subset), self.facts).specs
            typed_hashes = (spec.spec_hash for spec in typed_specs if isinstance(spec, RunSpec))
            return frozenset({self.spec(subset).spec_hash, *typed_hashes})
        except HarnessError:
            return frozenset()

    def command(self, subset: Collection[int], stored: Path | None, *, starved: bool = False) -> str | None:
        """Return a shell command that repeats the launch for `subset`, or None if no command can express it.

        `stored` is the file with its spec, for a launch that no options can express. `starved`: only a limit proves its
        hang, so the command names the limit.
        """
        if self.subject.unset_variables(subset) or self.subject.packages(subset):
            return None if stored is None else shlex.join(["nsa-harness", "run", str(stored)])
        limits = self._named_limits(subset) if starved else []
        if self.subject.form is SubjectForm.COMMIT:
            return (
                f"git checkout {self.subject.config(subset)['commit']} && {self._command_text(self.question, limits)}"
            )
        try:
            before, question = self._shell_variables(subset), self._invocation(subset)
        except HarnessError:
            return None
        words = question.arguments[: len(question.arguments) - len(before)]  # the variables are the last ones
        return " ".join((*before, self._command_text(replace(question, arguments=words), limits)))

    def _shell_variables(self, subset: Collection[int]) -> tuple[str, ...]:
        """Return the variable assignments that precede the command, such as "NAME=value"."""
        file = self._file(subset) if self.subject.form is SubjectForm.FILE else ""
        env = self.request.templates.fill(self.subject, subset, file).env
        # The arguments override these variables.
        overridden = {word.partition("=")[0].removeprefix("run.env.") for word in self.question.arguments}
        if self.question.script is None or any(name in overridden or _affects_harness(name) for name, _ in env):
            return ()
        return tuple(f"{name}={shlex.quote(text)}" for name, text in env)

    def _named_limits(self, subset: Collection[int]) -> list[str]:
        """Return command-line arguments that set the time limit derived from the known-good configuration's runs."""
        if self.longest_quiet_s is None or self.spec(subset).limits.open_wait_s is not None:
            return []
        return [f"limits.open_wait_s={proof_after_s(self.longest_quiet_s):g}"]

    @staticmethod
    def _command_text(question: Invocation, limits: Sequence[str] = ()) -> str:
        script, words = question.script, [_shell_quote(word) for word in (*question.arguments, *limits)]
        if script is None:
            return " ".join(["nsa-harness run", *words])
        args = ["--", *map(shlex.quote, script.args)] if script.args else []
        script_args = ["-m"] * script.module + [shlex.quote(script.file), "--ranks", str(script.ranks)]
        return " ".join(["nsa-harness run", *script_args, *words, *args])

    def _make_spec(self, subset: Collection[int]) -> RunSpec:
        specs = plan_launches(self._invocation(subset), self.facts).specs
        if len(specs) != 1:
            raise CannotLaunchError(
                f"{len(specs)} launches of one configuration; bisect takes a scenario without a matrix"
            )
        spec = specs[0]
        if isinstance(spec, Skip):
            raise CannotLaunchError(f"this machine cannot: {spec.reason}")
        unset = self.subject.unset_variables(subset)
        spec = replace(spec, env=tuple(pair for pair in spec.env if pair[0] not in unset))
        spec = self._with_packages(spec, subset)
        if self.trees is not None:
            spec = spec_in_checkout(spec, self._tree(subset))
        files = [digest(path) for _, path in self._both_files()] if self.subject.form is SubjectForm.FILE else ""
        text = f"{spec.spec_hash} {self.subject.config(subset)}{files}"
        notes = (*spec.notes, *filter(None, (self.request.templates.note,)))
        return replace(spec, notes=notes, spec_hash=hashlib.sha256(text.encode()).hexdigest()[:12])

    def _invocation(self, subset: Collection[int]) -> Invocation:
        question = self.question
        if self.trees is not None:
            question = replace(question, working_dir=self._tree(subset))
        if self.subject.is_declared and self.subject.form is not SubjectForm.COMMIT:
            question = replace(question, arguments=(*question.arguments, *self.subject.overrides(subset)))
        file = self._file(subset) if self.subject.form is SubjectForm.FILE else ""
        filled_templates = self.request.templates.fill(self.subject, subset, file)
        words = (*question.arguments, *(f"run.env.{name}={_yaml_quote(text)}" for name, text in filled_templates.env))
        if question.script is None:
            args = (
                (f"run.args={json.dumps([*self.request.base_args, *filled_templates.args])}",)
                if filled_templates.args
                else ()
            )
            return replace(question, arguments=(*words, *args))
        script = replace(question.script, args=(*question.script.args, *filled_templates.args))
        return replace(question, arguments=words, script=script)

    def _file(self, subset: Collection[int]) -> str:
        """Return the path of a config file mixed from the good and the bad file for a subset of the items."""
        good, bad = self._both_files()
        if len(subset) in (0, len(self.subject.items)):
            return (bad if subset else good)[0]
        text = mixed_text(good[1], bad[1], [self.subject.label(place) for place in subset])
        name = f"{hashlib.sha256(text.encode()).hexdigest()[:12]}{good[1].suffix}"
        return name if self.mixtures is None else str(self.mixtures.file(name, text))

    def _both_files(self) -> list[tuple[str, Path]]:
        assert isinstance(self.subject.good, list)
        return [(str(name), self.question.working_dir / str(name)) for name in self.subject.good]

    def _with_packages(self, spec: RunSpec, subset: Collection[int]) -> RunSpec:
        if self.mixtures is None or not (packages := self.subject.packages(subset)):
            return spec
        folders = self.mixtures.python_path(packages, spec.python)
        env = dict(spec.env)
        path = [*folders, env.get("PYTHONPATH", self.question.environ.get("PYTHONPATH", ""))]
        if folders:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        return replace(spec, env=tuple(sorted(env.items())))

    def _tree(self, subset: Collection[int]) -> Path:
        assert self.trees is not None
        return self.trees.checkout(str(self.subject.config(subset)["commit"]))


def _placeholder_names(text: str) -> set[str]:
    return set(_PLACEHOLDER.findall(text))


def _range_text(value: Plain) -> str:
    numbers = sorted(int(str(number)) for number in value) if isinstance(value, list) else []
    if not numbers:
        return "0:0"
    if numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise CannotLaunchError(
            f"layers {', '.join(map(str, numbers))} are no range; {{layers}} by itself could say them"
        )
    return f"{numbers[0]}:{numbers[-1] + 1}"


def _affects_harness(name: str) -> bool:
    return is_read_by_program(name) or name.startswith(ENV_PREFIX) or _HARNESS_VARIABLE.fullmatch(name) is not None


def _yaml_quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _shell_quote(word: str) -> str:
    """Return an argument quoted for a shell. Brackets are left unquoted, which keeps the argument readable."""
    return word if is_override(word) and re.fullmatch(r"[A-Za-z0-9_.=:,\[\]+-]*", word) else shlex.quote(word)


def parse_templates(args: Sequence[str], env: Sequence[str]) -> Templates:
    """Parse the templates given by --arg and --env-arg. Raise UsageError if one is invalid."""
    pairs = []
    for text in env:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env-arg: expected NAME=TEXT with a placeholder in it, got {value_text(text)}")
        pairs.append((name, value))
    return Templates(args=tuple(args), env=tuple(pairs))


def check_outcome(sought: SoughtFailure, subject: Subject, jobs: int) -> None:
    """Raise UsageError if a "slow" outcome is sought but cannot be measured with these options."""
    if sought.kind != SLOW:
        return
    if jobs > 1:
        raise UsageError("--outcome slow: parallel runs slow each other down; remove --jobs")
    if subject.form is SubjectForm.CHOICE and sought.step_s is None:
        raise UsageError(
            "--outcome slow: --choice has no good value to compare with; give a step time, such as slow:200ms"
        )


_MAX_PROBES = 1000  # a search that needs more test runs is stopped
_MAX_FILLED = 1000  # values of --choice in which names of files are searched


@dataclass(frozen=True, kw_only=True)
class BisectRequest:
    question: Invocation  # names the scenario or the script
    subject: Subject
    templates: Templates
    base_args: tuple[str, ...]  # the arguments of the scenario's program, to which the templates add theirs
    sought: SoughtFailure
    confidence: float
    repeat: int  # how often each proof is run
    jobs: int  # test runs at the same time
    budget_s: float | None  # limit for all test runs together
    fork: bool  # test runs are forked where that is safe, except the first `repeat` runs of a proof
    options: RunOptions
    # The user set a confidence, so a bad end that passes is run as often as this requires.
    confidence_requested: bool = False
    engine: EngineChoice | None = None  # runs each test run as a job


_KINDS = {
    SubjectForm.VALUE: QuestionKind.ORDERED,
    SubjectForm.COMMIT: QuestionKind.ORDERED,
    SubjectForm.CHOICE: QuestionKind.CHOICE,
}


@dataclass(frozen=True, kw_only=True)
class EarlierRuns:
    """The stored runs of a bisection's known-good and known-bad configurations, latest first."""

    good: tuple[StoredResult, ...] = ()
    bad: tuple[StoredResult, ...] = ()  # for a choice the runs of every value

    @property
    def failures(self) -> tuple[StoredResult, ...]:
        return tuple(run for run in self.bad if run.verdict in FAILED_STATUSES)

    @property
    def contradiction(self) -> tuple[StoredResult, ...]:
        """Return a passed and a failed run of the same configuration, or () if there are none."""
        for passing_run in (*self.good, *self.bad):
            for failing_run in (*self.good, *self.bad):
                is_same_launch = passing_run.spec_hash == failing_run.spec_hash
                if is_same_launch and passing_run.verdict == Status.PASS and failing_run.verdict in FAILED_STATUSES:
                    return passing_run, failing_run
        return ()

    def run_s(self, verdicts: Collection[str] = (Status.PASS, *FAILED_STATUSES)) -> float | None:
        """Return the mean duration in seconds of the runs with these verdicts, or None if there are none."""
        took = [run.wall_s for run in (*self.good, *self.bad) if run.verdict in verdicts]
        return sum(took) / len(took) if took else None

    @property
    def notes(self) -> tuple[str, ...]:
        if pair := self.contradiction:
            ends = " and ".join(f"{run.verdict} in {run.run_id}" for run in pair)
            return (f"stored runs of one configuration ended differently, {ends}: no answer is believed alone",)
        if self.failures:
            latest = self.failures[0]
            often = "it is run more often before it is said to pass"
            return (f"the bad end was seen failing before, {latest.verdict} in {latest.run_id}: {often}",)
        return ()


def find_earlier_runs(launches: Launches, parent: Path, but: str = "") -> EarlierRuns:
    """Return the stored runs of a bisection's good and bad configuration, except the run named `but`."""
    subject = launches.subject
    all_indices = range(len(subject.items))
    bad = [(index,) for index in all_indices] if subject.form is SubjectForm.CHOICE else [tuple(all_indices)]
    good_hashes, bad_hashes = (frozenset().union(*map(launches.hashes, subsets)) for subsets in ([()], bad))
    runs = tuple(earlier_results(parent, good_hashes | bad_hashes, but))
    return EarlierRuns(
        good=tuple(run for run in runs if run.spec_hash in good_hashes - bad_hashes),
        bad=tuple(run for run in runs if run.spec_hash in bad_hashes),
    )


def search_question(request: BisectRequest, earlier: EarlierRuns = EarlierRuns()) -> SearchQuestion:
    subject = request.subject
    earlier = EarlierRuns() if request.sought.kind == SLOW else earlier  # stored runs have no step times
    insistent = request.confidence_requested or bool(earlier.failures)
    unordered_kind = QuestionKind.RANGE if subject.in_a_row else QuestionKind.SET
    return SearchQuestion(
        kind=_KINDS.get(subject.form, unordered_kind),
        items=len(subject.items),
        together=tuple(map(frozenset, subject.together)),
        at_once=request.jobs,
        confidence=request.confidence,
        repeat=request.repeat,
        baseline=BASELINE_RUNS if request.sought.kind == SLOW and request.sought.step_s is None else 1,
        controls=control_runs(request.confidence, insistent=insistent),
        flaky=subject.noun == SEED or bool(earlier.contradiction),  # the question of seeds is whether there is a race
        unbounded=subject.open_end,
        max_probes=_MAX_PROBES,
    )


def launched_program(request: BisectRequest, launches: Launches) -> LaunchedProgram:
    """Return the program that a bisection launches, for its cache key. Over commits, only absolute paths count."""
    specs = [spec for spec in launches.ends() if isinstance(spec, RunSpec)]
    words = [*map(str, (*request.subject.items, *request.subject.good_values, *request.subject.bad_values))]
    for index in range(min(len(request.subject.items), _MAX_FILLED)):
        with suppress(CannotLaunchError):
            filled_templates = request.templates.fill(request.subject, frozenset({index}))
            words += [*filled_templates.args, *(value for _, value in filled_templates.env)]
    if request.subject.form is SubjectForm.COMMIT:
        words = [word for word in words if _is_absolute_path(word)]
        specs = [replace(spec, program=tuple(filter(_is_absolute_path, spec.program))) for spec in specs]
    working_dir = request.question.working_dir
    return LaunchedProgram(
        specs=specs, arguments=words, interpreter=query_interpreter_of(specs), working_dir=working_dir
    )


def make_cache_key(request: BisectRequest, launches: Launches, program: LaunchedProgram) -> CacheKey:
    """Return the cache key of a bisection. Test runs are reused only if every entry is unchanged."""
    question = request.question
    return {
        **program.file_entries(),
        **program.environment_entries(),
        "nsa-harness": __version__,
        LAUNCH_ENTRY: sealed_digest(*(_launch_identity(request.subject, spec) for spec in launches.ends())),
        "what is searched": sealed_digest(
            request.subject, request.templates, question.arguments, question.script, question.working_dir,
            request.sought, request.confidence, request.repeat, request.jobs, request.fork, request.options.probe,
            *filter(None, [request.engine]),
        ),
    }  # fmt: skip


def _launch_identity(subject: Subject, spec: RunSpec | str) -> object:
    """Return a value that is equal for two launches if they would run the same program in the same way."""
    if isinstance(spec, str):
        return spec
    return replace(spec, spec_hash="") if subject.form is SubjectForm.COMMIT else spec.spec_hash


def _is_absolute_path(word: str) -> bool:
    return word.startswith("/") or "=/" in word
