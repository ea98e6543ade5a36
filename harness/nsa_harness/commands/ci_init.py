"""The command `nsa-harness ci init`: write a CI workflow into a user's repository."""

from __future__ import annotations

import difflib
import os
import shlex
from importlib.resources import files
from pathlib import Path

from nsa_harness.errors import UsageError
from nsa_harness.supervisor.storage.rundir import write_document

_FILES = {"github": ".github/workflows/nsa-harness.yml", "gitlab": ".gitlab-ci.yml"}


def workflow_file(target: str, ranks: int, host: str) -> tuple[Path, str]:
    """Return the path and the text of a workflow that runs `target`, a script or scenario. `host`: github or gitlab.

    Raises UsageError if the script is not in the repository around the working directory.
    """
    here = Path.cwd()
    root = next((path for path in (here, *here.parents) if (path / ".git").exists()), here)
    command = shlex.quote(target)
    if target.endswith(".py"):
        script = Path(os.path.normpath(here / target))
        if not script.is_file() or not script.is_relative_to(root):
            raise UsageError(f"no file {target} in the repository {root}; name the script to run")
        command = f"{shlex.quote(str(script.relative_to(root)))} --ranks {ranks}"
    template = files("nsa_harness.texts").joinpath(f"ci.{host}.yml").read_text(encoding="utf-8")
    return root / _FILES[host], template.replace("{command}", command)


def is_written(path: Path, text: str) -> bool:
    """Return whether the file exists with this text. Raise UsageError with a diff if it has another one."""
    if not os.path.lexists(path):
        return False
    try:
        old = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} exists and is not changed, but it cannot be read: {error}") from None
    if old == text:
        return True
    sides = old.splitlines(keepends=True), text.splitlines(keepends=True)
    diff = "".join(difflib.unified_diff(*sides, path.name, f"{path.name} (by nsa-harness)"))
    raise UsageError(
        f"{diff}\n{path} exists and is not changed; copy what you need from the + lines, or remove the file"
    )


def write_workflow(path: Path, text: str) -> None:
    """Write the file, unless it was created in the meantime."""
    if not is_written(path, text):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_document(path, text)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from None
