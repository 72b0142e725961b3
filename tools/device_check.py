"""Tests, certificates and a small measurement on a device, in at most six minutes.

    python -m tools.device_check [DEVICE]

The device is cuda unless another one is named. The tests are those of `tests/test_devices.py`; certificates
are those of the pretrained networks, in float32, against equilibria that the processor finds in float64; a
training step is measured beside the bare operators for as many evaluations. The exit status says whether the
tests and certificates are in order.
"""

import copy
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.cells import CELLS
from benchmarks.measure import Deadline, step_memory
from benchmarks.problem import Problem
from benchmarks.table import measure, ours_and_limit
from opteq import Anderson, certify
from opteq.models.classifier import ImageClassifier
from opteq.models.loading import ModelCard, load, pretrained

ROOT = Path(__file__).parents[1]
SECONDS, SECONDS_OF_TESTS = 360, 240
MEASURED = ("opteq", "dense", "geq", "deep")
RUNS = 5


def tests_pass(device: torch.device) -> bool:
    """Whether the tests of devices pass there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_devices.py"]
    environment = os.environ | {"OPTEQ_TEST_DEVICE": str(device)}
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=SECONDS_OF_TESTS).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"The tests took longer than {SECONDS_OF_TESTS} seconds.")
        return False


def certificates_hold(device: torch.device) -> bool:
    """Whether no equilibrium of the pretrained networks is further away than its certificate says."""
    good = True
    print(f"{'certificates':20} {'distance':>10} {'bound':>10}")
    for name in pretrained():
        network = load(name)
        assert isinstance(network, ImageClassifier)
        (layer,) = network.equilibrium_layers
        card = ModelCard.read(name)
        sides = (card.image_size,) * 2 if isinstance(card.image_size, int) else card.image_size
        images = torch.randn(8, card.in_channels, *sides, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            x = network.stem(images)
            exact = copy.deepcopy(layer).double()
            exact.solver = Anderson(tol=1e-12, max_steps=2000)
            truth = exact(x.double())
        certificate = certify(layer.to(device), x.to(device))
        assert isinstance(certificate.state, torch.Tensor)
        distance = (certificate.state.cpu().double() - truth).flatten(1).norm(dim=1)
        bound = certificate.distance.value.cpu()
        good &= bool((distance <= bound).all())
        print(f"{name:20} {distance.max().item():10.1e} {bound[distance.argmax()].item():10.1e}")
    return good


def show_times(device: torch.device, deadline: Deadline) -> None:
    """Print what training steps take, beside the bare operators."""
    print(f"{'milliseconds':20} {'forward':>10} {'bare':>10} {'backward':>10} {'bare':>10} {'memory':>10}")
    for name in MEASURED:
        if deadline.passed():
            print("There was no time for the others.")
            return
        problem = Problem(CELLS[name], device)
        layouts = CELLS[name].family.operator.layouts
        contenders = [contender for layout in layouts for contender in ours_and_limit(problem, layout)]
        ours, bare = measure(contenders, RUNS, with_quality=False).values()
        times = (ours.forward, bare.forward, ours.backward, bare.backward)
        memory = f"{step_memory(contenders[0]) / 2**20:.1f} MiB"
        print(f"{name:20} " + " ".join(f"{1000 * seconds:10.2f}" for seconds in times) + f" {memory:>10}")


def main(name: str = "cuda") -> int:
    """Check a device."""
    device, end = torch.device(name), Deadline(SECONDS)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            sys.exit("There is no CUDA device here; name another one, such as cpu.")
        # TF32 rounds to 11 bits, too coarse for the tolerances here.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    begin = time.monotonic()
    good = tests_pass(device)
    good &= certificates_hold(device)
    show_times(device, end)
    verdict = "in order" if good else "NOT in order"
    print(
        f"Tests and certificates are {verdict} on {device}; all of it took {time.monotonic() - begin:.0f} s."
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
