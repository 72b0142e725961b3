"""Networks with a fixed number of iterations in place of every solve, for other programs to run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.onnx import OnnxExporterError

from opteq.data.finding import find_images
from opteq.data.images import read_image
from opteq.data.preprocess import Normalization
from opteq.errors import ConfigError
from opteq.evaluation.display import OfPixels
from opteq.gradients.unrolled import Unrolled
from opteq.layer import EquilibriumLayer
from opteq.models.loading import ModelCard
from opteq.operators.base import LinearOperator
from opteq.operators.norms.base import NormControl, Weights
from opteq.options import check_choice, check_counts
from opteq.solvers.anderson import Anderson
from opteq.system.files import write_file
from opteq.system.progress import Progress

FORMATS = ("onnx", "torch")
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
CHECKED = 100
TRIED = (5, 10, 20, 40, 80, 160, 320)
"""Numbers of iterations, from which the first that reaches the tolerance is taken."""
ANY_BATCH = ({0: torch.export.Dim("batch")},)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        path: the file.
        steps: iterations in place of every solve.
        error: largest difference of a logit to that of the equilibria, which are solved for to 1e-9, relative
            to the largest of the logits, on the images that it was checked with.
        megabytes: size of the file.
    """

    path: Path
    steps: int
    error: float
    megabytes: float


def default_output(run: Path, format: str) -> Path:
    """In the folder of a run; for a pretrained network a file of its name."""
    suffix = SUFFIXES[format]
    return run / f"model{suffix}" if run.is_dir() else run.with_name(run.name + suffix)


def check_pixels(card: ModelCard, folder: Path | None, skip: Callable[[str], None] = warnings.warn) -> Tensor:
    """Up to 100 images of a folder in [0, 1], as a network takes them; without a folder as many of noise.

    `skip` receives a sentence about files that are left out, as of `opteq.training.predict.predict_images`.

    Raises:
        ConfigError: there is no such folder, or no image in it that can be read.
    """
    size = card.image_size
    if folder is None:
        height, width = (size, size) if isinstance(size, int) else size
        generator = torch.Generator().manual_seed(0)
        return torch.rand(CHECKED, card.in_channels, height, width, generator=generator)
    if not isinstance(size, int):
        raise ConfigError("The images of segmentation are not read from a folder here; leave out `images`.")
    images = []
    for path in find_images(folder, skip)[:CHECKED]:
        try:
            images.append(read_image(path, card.in_channels, size))
        except ConfigError as error:
            skip(str(error))
    if not images:
        raise ConfigError(f"None of the images in {folder} could be read.")
    return torch.stack(images) / 255


def export(
    network: nn.Module,
    pixels: Tensor,
    path: str | Path,
    format: str = "onnx",
    steps: int | None = None,
    tol: float = 1e-3,
    normalization: Normalization | None = None,
) -> Exported:
    """Write a network as a graph of plain operations that needs no opteq, and check what it computes.

    Every solve becomes `steps` plain iterations from the start of its layer, and every norm that is kept
    below a ceiling a constant. The graph takes pixels in [0, 1] in batches of any size, of the height and
    width of `pixels`.

    Args:
        network: maps normalised images to logits, in eval mode; left as it is.
        pixels: images in [0, 1], `(batch, channels, height, width)`, to check it with.
        path: the file to write, which must not be there yet.
        format: `"onnx"`, checked with onnxruntime, or `"torch"`, a program of `torch.export`.
        steps: number of iterations; the first of `TRIED` whose error is at most `tol` unless given.
        tol: the largest relative error of the logits.
        normalization: mean and standard deviation of each channel, which become part of the graph; without it
            the network takes the pixels as they are.

    Raises:
        ConfigError: a package is missing, no number of iterations that is tried reaches `tol`, or ONNX cannot
            express what the network does.
    """
    check_choice("format", format, FORMATS)
    if steps is not None:
        check_counts(steps=steps)
    path = Path(path)
    if path.exists():
        raise ConfigError(f"{path} is there already; remove it or choose another --output.")
    whole = OfPixels(network, normalization or Normalization.none(pixels.shape[1])).eval()
    with torch.no_grad():
        expected = _exact(whole)(pixels.double()).float()
        iterated = _kept(whole, pixels)

        def error_after(count: int) -> float:
            _iterate(iterated, count)
            return _error(iterated(pixels), expected)

        count = steps or _enough(error_after, tol)
        if count is None:
            raise ConfigError(
                f"After {TRIED[-1]} iterations the logits are still {error_after(TRIED[-1]):.1e} of their"
                f" size from those of the equilibria, more than {tol:g}; give a larger --tol, or a number of"
                f" iterations with --steps.{_own_limit(whole, pixels, expected, tol)}"
            )
    _iterate(iterated, count)
    write, run = {"onnx": (_write_onnx, _run_onnx), "torch": (_write_program, _run_program)}[format]
    content = write(iterated, pixels)
    error = _error(run(content, pixels), expected)
    write_file(path, content)
    return Exported(path, count, error, len(content) / 1e6)


def _kept(network: nn.Module, x: Tensor) -> nn.Module:
    """A copy with the weights that act on inputs like `x`."""
    network = copy.deepcopy(network)
    for module in network.modules():
        if isinstance(module, LinearOperator):
            module.norm_control = _Kept(module.norm_control)
    network(x)
    return network


def _enough(error_after: Callable[[int], float], tol: float) -> int | None:
    """The first of `TRIED` that is accurate enough; None if none is."""
    with Progress("Looking for the number of iterations", sum(TRIED)) as progress:
        for count in TRIED:
            if error_after(count) <= tol:
                return count
            progress.advance(count)
    return None


def _own_limit(network: nn.Module, pixels: Tensor, expected: Tensor, tol: float) -> str:
    """A sentence for who asks for more than the network's own solvers give; empty where they reach `tol`."""
    layers = [module for module in network.modules() if isinstance(module, EquilibriumLayer)]
    tolerances = [layer.solver.tol for layer in layers if layer.solver is not None]
    own = _error(network(pixels), expected)
    if own <= tol or not tolerances:
        return ""
    return (
        f" The network's own solver, which stops at a relative residual of {max(tolerances):g}, leaves the"
        f" logits {own:.1e} from there."
    )


def _iterate(network: nn.Module, steps: int) -> None:
    """Have a network iterate so often in place of every solve."""
    for module in network.modules():
        if isinstance(module, EquilibriumLayer):
            module.gradient, module.on_unconverged = Unrolled(steps), "count"


def _exact(network: nn.Module) -> nn.Module:
    """A copy in double precision whose equilibria are far closer than anything that is written."""
    network = copy.deepcopy(network).double()
    for module in network.modules():
        if isinstance(module, EquilibriumLayer) and module.solver is not None:
            module.solver = Anderson(tol=1e-9, max_steps=2000)
    return network


class _Kept(NormControl):
    """Weights as they acted once."""

    def __init__(self, control: NormControl) -> None:
        self.control = control
        self.weights: Weights | None = None

    def weight(self, operator: nn.Module) -> Tensor:
        # What it is made of stays out of the graph.
        return self.control.weight(operator) if self.weights is None else self.weights[0]

    def scaled(self, weights: Weights, ceiling: float | None, norm: Callable[[], Tensor]) -> Weights:
        if self.weights is None:
            scaled = self.control.scaled(weights, ceiling, norm)
            self.weights = tuple(
                weight.detach().clone(memory_format=torch.contiguous_format) for weight in scaled
            )
        return self.weights


def _write_onnx(network: nn.Module, pixels: Tensor) -> bytes:
    try:
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    try:
        program = torch.onnx.export(
            network,
            (pixels,),
            input_names=["pixels"],
            output_names=["logits"],
            dynamic_shapes=ANY_BATCH,
            dynamo=True,
            verbose=False,
        )
    except OnnxExporterError as error:
        # Of its many lines the last that names an error says which operation it was.
        reasons = [line for line in str(error).splitlines() if line.startswith("<class")]
        raise ConfigError(
            "ONNX has no operation for a part of this network, such as the norm of the projections of patches"
            f" ({reasons[0] if reasons else error}); give it the format torch."
        ) from error
    assert program is not None
    return program.model_proto.SerializeToString()


def _run_onnx(content: bytes, pixels: Tensor) -> Tensor:
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    (logits,) = onnxruntime.InferenceSession(content).run(None, {"pixels": pixels.numpy()})
    return torch.from_numpy(logits)


def _missing(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"The format onnx needs the package {error.name}: pip install 'opteq[export]'.")


def _write_program(network: nn.Module, pixels: Tensor) -> bytes:
    file = BytesIO()
    torch.export.save(torch.export.export(network, (pixels,), dynamic_shapes=ANY_BATCH), file)
    return file.getvalue()


def _run_program(content: bytes, pixels: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.export.load(BytesIO(content)).module()(pixels)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
