"""Commits of any git repository: those between two, and a worktree of each that is tried."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from nsa_harness.errors import UsageError

_LIMIT_S = 120.0
_SUBJECT = 60


@dataclass(frozen=True, kw_only=True)
class Commit:
    sha: str  # as short as git finds unambiguous
    words: str  # "1a2b3c4d5 Make the loss fall"


@dataclass(frozen=True, kw_only=True)
class Between:
    """`later`: the commits after the good one, up to the bad one, oldest first."""

    good: str
    later: tuple[Commit, ...]


def commits_between(inside: Path, good: str, bad: str) -> Between:
    """Along the first parents, as merges are made. Raises UsageError for what is no commit, or no ancestor."""
    shas = [_commit(inside, name) for name in (good, bad)]
    if _git(inside, "merge-base", "--is-ancestor", *shas).returncode != 0:
        raise UsageError(f"--commits: {good} is no ancestor of {bad}; name the older, good one first")
    listed = _git(inside, "log", "--reverse", "--first-parent", "--format=%h %s", f"{shas[0]}..{shas[1]}")
    later = [line.partition(" ") for line in listed.stdout.splitlines()]
    if not later:
        raise UsageError(f"--commits: no commit lies between {good} and {bad}")
    named = (Commit(sha=sha, words=f"{sha} {text[:_SUBJECT]}") for sha, _, text in later)
    return Between(good=_git(inside, "rev-parse", "--short", shas[0]).stdout.strip(), later=tuple(named))


@dataclass(kw_only=True)
class Worktrees:
    """A checkout of each commit that was asked for, beside the user's own, which is not touched."""

    repository: Path  # any directory in it
    home: Path
    made: dict[str, Path] = field(default_factory=dict)

    def of(self, sha: str) -> Path:
        """The directory that corresponds to `repository` at this commit. Raises UsageError where it is not there."""
        if sha not in self.made:
            path = self.home / sha
            if not path.is_dir():
                added = _git(self.repository, "worktree", "add", "--detach", "--force", str(path), sha)
                if added.returncode != 0:
                    raise UsageError(f"git worktree of {sha}: {_last_line(added.stderr)}")
            self.made[sha] = path
        root = _git(self.repository, "rev-parse", "--show-toplevel").stdout.strip()
        inside = self.repository.resolve().relative_to(root)
        if not (self.made[sha] / inside).is_dir():
            raise UsageError(f"{sha} has no directory {inside}")
        return self.made[sha] / inside

    def close(self) -> None:
        """Gone, all of them; what a kill leaves is found again by the same command."""
        for path in self.made.values():
            _git(self.repository, "worktree", "remove", "--force", str(path))
        self.made.clear()
        _git(self.repository, "worktree", "prune")


def _commit(inside: Path, name: str) -> str:
    found = _git(inside, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if found.returncode != 0:
        why = f": {_last_line(found.stderr)}" if found.stderr.strip() else ""
        raise UsageError(f"--commits: {name!r} is no commit of the repository at {inside}{why}")
    return found.stdout.strip()


def _git(inside: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(inside), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"git {words[0]}: {error}; is git installed?") from None


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no reason given"
