"""Engines, which run jobs on this machine, on a list of hosts, or on a Slurm cluster. Packages can add engines."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from nsa_harness.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from nsa_harness.engine.interface import Engine
    from nsa_harness.engine.site import Site

GROUP = "nsa_harness.engines"  # the entry points of this group, in any installed package, are further engines
_BUILT_IN = {"local": "local:LocalEngine", "hosts": "hosts:HostsEngine", "slurm": "slurm:SlurmEngine"}


def engine_named(name: str, site: Site) -> Engine:
    """Return the engine with this name, for the cluster that `site` describes. Raise UsageError if there is none."""
    others = {entry.name: entry for entry in entry_points(group=GROUP)}
    known = [*_BUILT_IN, *others]
    if name not in known:
        raise UsageError(f"--engine: no engine {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    module, _, attribute = _BUILT_IN.get(name, "").partition(":")
    make = getattr(import_module(f"{__name__}.{module}"), attribute) if module else others[name].load()
    engine: Engine = make(site)
    return engine
