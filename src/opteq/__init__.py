"""Optimization-induced equilibrium models for PyTorch."""

from importlib import import_module

# Known to type checkers by its name; `typing` itself takes longer to import than all the rest here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from opteq.api import *  # noqa: F403
    from opteq.models.loading import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # On demand: whoever asks for the version, or the command for its help, need not wait for torch.
    if name == "load":  # reading weights needs safetensors, which the core does without
        return import_module("opteq.models.loading").load
    if name == "__all__" or not name.startswith("__"):
        api = import_module("opteq.api")
        globals().update({known: getattr(api, known) for known in ("__all__", *api.__all__)})
    if name not in globals():
        from opteq.spelling import did_you_mean

        hint = did_you_mean(name, __dir__(), "")
        raise AttributeError(f"module 'opteq' has no attribute {name!r}" + (f"; {hint}" if hint else ""))
    return globals()[name]


def __dir__() -> list[str]:
    return [*import_module("opteq.api").__all__, "__version__", "load"]
