import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from opteq import Anderson, Dense, HiddenReadout, KernelMap, KernelMOptEq, OptEqUnit
from opteq.errors import ConfigError
from opteq.evaluation.trace import noting
from opteq.layer import EquilibriumLayer
from opteq.models.bodies import Unit
from opteq.models.classifier import ImageClassifier
from opteq.models.heads import Head
from opteq.operators import bound
from opteq.show.settings import Settings
from opteq.show.viewer import MOST_BYTES, Sample, Viewer, _distance
from tests.show.conftest import MEAN, STD, card

AS_TRAINED = Settings()


def pixels_of(uri):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


class TestEquilibrium:
    def test_every_state_has_its_pictures_and_its_prediction(self, viewer):
        found = viewer.equilibrium("test-0", AS_TRAINED)
        json.dumps(found, allow_nan=False)
        assert [frame["step"] for frame in found["frames"]][:2] == ["0", "1"]
        assert found["frames"][-1]["step"] == "*"
        assert all(len(frame["pictures"]) == len(found["pictures"]) for frame in found["frames"])
        assert len(found["shares"]) == len(found["labels"]) == len(found["frames"])
        with torch.no_grad():
            logits = viewer.network(viewer._images["test-0"].image)[0]
        expected = dict(zip(viewer.card.class_names, logits.softmax(0).tolist(), strict=True))
        got = dict(zip(found["classes"], found["shares"][-1], strict=True))
        assert got == pytest.approx(expected, abs=1e-6)
        assert found["labels"][-1] == viewer.card.class_names[int(logits.argmax())]

    def test_the_zero_state_is_drawn_in_the_lowest_colour(self, viewer):
        first = pixels_of(viewer.equilibrium("test-0", AS_TRAINED)["frames"][0]["pictures"][0])
        assert first.shape == (8, 8, 3)
        assert (first == first[0, 0]).all()

    def test_what_the_network_reads_of_a_state_is_named(self, viewer, hidden_viewer):
        assert viewer.equilibrium("test-0", AS_TRAINED)["read"] == "z"
        assert hidden_viewer.equilibrium("test-0", AS_TRAINED)["read"] == "y"

    def test_a_solve_that_falls_short_is_said(self, viewer):
        for layer in viewer.network.equilibrium_layers:
            layer.solver = type(layer.solver)(tol=1e-5, max_steps=2)
        assert "did not reach the tolerance" in viewer.equilibrium("test-0", AS_TRAINED)["outcome"]

    def test_an_image_that_is_not_there(self, viewer):
        with pytest.raises(ConfigError, match="not here any more"):
            viewer.equilibrium("test-9", AS_TRAINED)

    def test_pixels_have_masks(self):
        torch.manual_seed(0)
        network = ImageClassifier(nn.Conv2d(1, 4, 1), Unit(4, 4), nn.Conv2d(4, 3, 1)).eval()
        image = torch.rand(1, 1, 8, 8)
        truth = torch.arange(64).view(8, 8) % 4 - 1  # -1 where there is none
        viewer = Viewer("pixels", network, card("segmentation"), [Sample(image, "one", truth)])
        found = viewer.equilibrium("test-0", AS_TRAINED)
        with torch.no_grad():
            counts = network(image)[0].argmax(0).flatten().bincount(minlength=3) / 64
        expected = dict(zip(viewer.card.class_names, counts.tolist(), strict=True))
        assert dict(zip(found["classes"], found["shares"][-1], strict=True)) == pytest.approx(expected)
        assert len(found["masks"]) == len(found["frames"])
        assert pixels_of(found["masks"][-1]).shape == (8, 8, 3)
        with pytest.raises(ConfigError, match="classifies pixels"):
            viewer.attack("test-0", AS_TRAINED, 0.1)
        with pytest.raises(ConfigError, match="classifies pixels"):
            viewer.attention("test-0", AS_TRAINED)
        radius = viewer.certificate("test-0", AS_TRAINED, "Robust radius")
        assert radius.startswith("Not available: A robust radius")
        (entry,) = viewer.describe()["images"]
        shown = pixels_of(entry["truth"]["mask"])
        assert (shown[:, ::4] == 255).all()
        # One colour for each of the classes, that of the predictions.
        colours = {tuple(map(int, colour)) for colour in shown[:, 1:4].reshape(-1, 3)}
        predicted = {tuple(bytes.fromhex(colour[1:])) for colour in found["colours"]}
        assert len(colours) == 3
        assert predicted <= colours


class TestCertificate:
    def test_the_bound_is_above_the_distance_to_a_tight_solve(self, viewer):
        from opteq.theory.certificates import certify

        text = viewer.certificate("test-0", AS_TRAINED, "Distance to the optimum")
        bound = float(text.removeprefix("‖z - z*‖ is at most ").partition(",")[0])
        with torch.no_grad():
            features = viewer.network.stem(viewer._images["test-0"].image)
        assert float(certify(viewer.network.body, features).distance_to_reference.value) <= bound < 1

    def test_what_is_refused_is_a_sentence(self, viewer):
        network, samples = viewer.network, list(viewer._images.values())
        network.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(3), nn.Softsign())
        network(samples[0].image)
        viewer = Viewer("another head", network, viewer.card, samples)
        names = viewer.describe()["statements"]
        assert names == ["Distance to the optimum", "What the equilibrium is", "Robust radius"]
        texts = [viewer.certificate("test-0", AS_TRAINED, name) for name in names]
        assert [text.startswith("Not available: ") for text in texts] == [False, False, True]
        with pytest.raises(ConfigError, match=r"no statement 'all' in a certificate; there are Distance"):
            viewer.certificate("test-0", AS_TRAINED, "all")

    def test_what_else_is_asked_for_meanwhile_does_not_matter(self, viewer):
        expected = viewer.certificate("test-0", AS_TRAINED, "Distance to the optimum")
        assert not expected.startswith("Not available")
        with noting(m for m in viewer.network.modules() if isinstance(m, EquilibriumLayer)):
            assert viewer.certificate("test-0", AS_TRAINED, "Distance to the optimum") == expected

    def test_norms_are_bounded_once_for_all_images_and_settings(self, viewer, monkeypatch):
        bounded = []

        def dense_norm_bound(operator):
            bounded.append(operator)
            return dense(operator)

        dense = bound.dense_norm_bound
        monkeypatch.setattr(bound, "dense_norm_bound", dense_norm_bound)

        def certify(key, settings):
            for name in viewer.describe()["statements"]:
                assert not viewer.certificate(key, settings, name).startswith("Not available")

        certify("test-0", AS_TRAINED)
        # W and U, once each.
        assert len(bounded) == 2
        certify("test-1", AS_TRAINED)
        certify("test-0", Settings(regulariser="squared norm", strength=0.1))
        assert len(bounded) == 2

    @pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
    def test_weights_in_a_graph_are_certified_too(self):
        # As the older weight norm leaves them, which cannot be copied as they are.
        torch.manual_seed(0)
        network = ImageClassifier(nn.utils.weight_norm(nn.Conv2d(1, 4, 1)), Unit(4, 4), Head(4, 3)).eval()
        viewer = Viewer("normed", network, card(), [Sample(torch.rand(1, 1, 8, 8), "one")])
        assert viewer.certificate("test-0", AS_TRAINED, "Distance to the optimum").startswith("‖z - z*‖")
        settings = Settings(regulariser="squared norm", strength=0.1)
        assert viewer.equilibrium("test-0", settings)["frames"]


class TestAttack:
    def test_it_stays_within_epsilon_and_reports_the_prediction(self, viewer):
        clean = pixels_of(viewer._entry("test-0")["picture"]).astype(int)
        found = viewer.attack("test-0", AS_TRAINED, 8 / 255)
        moved = np.abs(pixels_of(found["image"]).astype(int) - clean)
        assert 0 < moved.max() <= 8
        assert found["changed"] == (found["labels"][0] != found["labels"][1])
        place = found["classes"].index(found["labels"][0])
        assert found["shares"][1][place] < found["shares"][0][place]

    def test_attention_is_a_picture_of_the_size_of_the_image(self, viewer):
        assert pixels_of(viewer.attention("test-0", AS_TRAINED)["picture"]).shape == (8, 8, 4)


class TestAdd:
    def test_an_own_image_is_normalised_as_the_card_says(self, viewer, png):
        content, pixels = png
        entry = viewer.add("four.png", content)
        expected = (pixels / 255 - MEAN) / STD
        np.testing.assert_allclose(viewer._images[entry["key"]].image[0, 0].numpy(), expected, atol=1e-6)
        assert (entry["name"], entry["truth"]) == ("four.png", {})
        assert viewer.equilibrium(entry["key"], AS_TRAINED)["frames"]

    def test_oblong_images_of_networks_that_take_them(self, viewer, png):
        wide = Viewer("wide", viewer.network, card(size=(4, 16)), [])
        key = wide.add("a.png", png[0])["key"]
        assert wide._images[key].image.shape == (1, 1, 4, 16)

    def test_damaged_files_and_others_are_named_in_one_sentence(self, viewer, png):
        for content in (b"", b"no image", png[0][:45]):
            with pytest.raises(ConfigError, match=r"^x\.png is not an image that can be read; choose"):
                viewer.add("../../x.png", content)

    def test_large_files_are_refused(self, viewer):
        with pytest.raises(ConfigError, match="more than the 20"):
            viewer.add("x.png", bytes(MOST_BYTES + 1))

    def test_a_file_that_comes_again_is_the_same_image_and_the_newest(self, viewer, png):
        entry = viewer.add("a.png", png[0])
        assert viewer.add("b.png", png[0])["key"] != entry["key"]
        assert viewer.add("a.png", png[0]) == entry
        assert [image["name"] for image in viewer.describe()["images"]][3:] == ["b.png", "a.png"]

    def test_the_oldest_make_room(self, viewer, png):
        keys = [viewer.add(f"{i}.png", png[0])["key"] for i in range(18)]
        assert keys[0] not in viewer._images
        assert keys[-1] in viewer._images
        assert "test-0" in viewer._images


def test_the_distance_names_what_is_read():
    torch.manual_seed(0)
    unit = OptEqUnit(Dense(4, 6), Dense(3, 6))
    kernels = KernelMOptEq([KernelMap(Dense(5, 4), Dense(3, 5), max_norm=0.5) for _ in range(2)])
    for map, name in ((unit, "z"), (HiddenReadout(unit), "y"), (kernels, "z")):
        network = nn.Sequential(EquilibriumLayer(map, Anderson(tol=1e-4))).eval()
        assert f"‖{name} - {name}*‖" in _distance(network, torch.ones(1, 3), None)
