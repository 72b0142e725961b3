import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from opteq.models.loading import ModelCard
from opteq.show.server import ShowServer
from opteq.show.viewer import Sample, Viewer
from tests.networks import unit_classifier

MEAN, STD = 0.25, 0.5


def card(task="classification", channels=1, size=8):
    return ModelCard({}, ("no", "yes", "maybe"), channels, size, (MEAN,) * channels, (STD,) * channels, task)


@pytest.fixture
def viewer():
    """Untrained, which is enough to look at: three images of 8×8 pixels, three classes."""
    torch.manual_seed(0)
    network = unit_classifier(in_channels=1, classes=3).eval()
    images = (torch.rand(3, 1, 1, 8, 8) - MEAN) / STD
    yes = torch.tensor(1)
    samples = [Sample(image, f"test image {i}, yes", yes) for i, image in enumerate(images, start=1)]
    return Viewer("small", network, card(), samples)


@pytest.fixture
def hidden_viewer(viewer):
    """The same images for a network that reads the hidden variable."""
    network = unit_classifier(in_channels=1, classes=3, readout="hidden").eval()
    return Viewer("hidden", network, card(), list(viewer._images.values()))


@pytest.fixture
def server(viewer):
    with ShowServer(viewer, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def png():
    """The bytes of a grey picture of 8×8 pixels, and its pixels."""
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue(), pixels
