import subprocess
import sys

# Nothing but torch can be imported, as after `pip install opteq`.
TORCH_ALONE = """
import importlib, pkgutil, sys

HIDDEN = {
    "captum", "cvxpy", "jsonargparse", "lightning", "matplotlib", "pandas", "PIL", "safetensors", "scipy",
    "sklearn", "tensorboard", "timm", "torchdeq", "torchdiffeq", "torchmetrics", "torchvision", "yaml",
}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

sys.meta_path.insert(0, Blocker())
"""

# Import every core module and solve one equilibrium.
SCRIPT = f"""{TORCH_ALONE}
import torch
import opteq

CORE = (
    "activations equation errors gradients layer maps native objectives operators options results solvers"
    " tensors theory"
)
for name in CORE.split():
    module = importlib.import_module("opteq." + name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        importlib.import_module(found.name)

torch.manual_seed(0)
layer = opteq.EquilibriumLayer(opteq.OptEqUnit(opteq.Dense(3, 5), opteq.Dense(4, 5)))
solution = layer.solve(torch.randn(2, 4))
solution.value.sum().backward()
assert solution.info.converged.all()
assert not HIDDEN & {{name.partition(".")[0] for name in sys.modules}}
print("solved")
"""


def test_the_core_needs_torch_alone():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "solved\n"), result.stderr


NAMES = """
import sys
import opteq

assert "torch" not in sys.modules
assert opteq.__version__
from opteq import *

assert OptEqUnit is opteq.OptEqUnit is sys.modules["opteq.maps.optequnit"].OptEqUnit
assert native is opteq.native
assert opteq.solvers.picard.Picard is Picard
assert {"OptEqUnit", "load", "__version__"} <= set(dir(opteq))
assert not hasattr(opteq, "nothing") and not hasattr(opteq, "__wrapped__")
assert opteq.load.__module__ == "opteq.models.loading"
"""


def test_names_come_at_their_first_use():
    result = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_command_says_what_the_layers_alone_lack():
    script = TORCH_ALONE + "from opteq.cli import main; sys.exit(main(sys.argv[1:]))"

    def said(*arguments):
        command = [sys.executable, "-c", script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    informed, refused = said("info"), said("fit", "--config", "digits")
    assert informed.returncode == 0, informed.stderr
    assert "compiled code   " in informed.stdout
    assert "opteq fit --config" in said("--help").stdout
    assert "digits" in said("presets").stdout
    assert refused.returncode == 2
    assert refused.stderr == (
        "opteq: The package yaml is not installed; pip install 'opteq[train]' brings what commands need"
        " beyond the layers.\n"
    )
