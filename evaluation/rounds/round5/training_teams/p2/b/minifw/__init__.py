from .hooks import HOOKS, Hook, Priority, build_hooks
from .runner import Runner
