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


class WorkflowFile:
    """A workflow that runs `target`, a script or scenario, in the repository around the working directory.

    Raises UsageError if the script does not exist or is outside the repository.
    """

    def __init__(self, target: str, ranks: int, *, is_gitlab: bool) -> None:
        here = Path.cwd()
        root = next((path for path in (here, *here.parents) if (path / ".git").exists()), here)
        command = shlex.quote(target)
        if target.endswith(".py"):
            script = Path(os.path.normpath(here / target))
            if not script.is_file():
                raise UsageError(f"no file {target}; name the script to run, relative to the working directory")
            if not script.is_relative_to(root):
                raise UsageError(f"{target} is not in the repository {root}")
            command = f"{shlex.quote(str(script.relative_to(root)))} --ranks {ranks}"
        host = "gitlab" if is_gitlab else "github"
        template = files("nsa_harness.texts").joinpath(f"ci.{host}.yml").read_text(encoding="utf-8")
        self.name = _FILES[host]
        self._path = root / self.name
        self._text = template.replace("{command}", command)
        self.is_written = self._is_there()

    def shown(self) -> str:
        """Return the file to write, or a line that says that it is there already."""
        if self.is_written:
            return f"{self.name} is there already, with the same content"
        return f"# {self.name}\n\n{self._text}"

    def write(self) -> None:
        """Write the file. Raise UsageError if it was created in the meantime, or if it cannot be written."""
        if self._is_there():
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_document(self._path, self._text)
        except OSError as error:
            raise UsageError(f"{self.name}: {error.strerror or error}") from None

    def _is_there(self) -> bool:
        """Return whether the file exists with this content. Raise UsageError with a diff if it has another content."""
        if not os.path.lexists(self._path):
            return False
        try:
            old = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.name} exists and is not changed, but it cannot be read: {error}") from None
        if old == self._text:
            return True
        sides = old.splitlines(keepends=True), self._text.splitlines(keepends=True)
        diff = "".join(difflib.unified_diff(*sides, self.name, f"{self.name} (by nsa-harness)"))
        raise UsageError(
            f"{diff}\n{self.name} exists and is not changed; copy what you need from the + lines, or remove the file"
        )
