"""What timm's own tests ask of each of its models, asked of ours."""

import pytest
import torch
from safetensors.torch import save_file

import opteq
from opteq.configs import presets, read_config
from opteq.errors import NonFiniteError

timm = pytest.importorskip("timm", reason="timm is not installed")

import opteq.timm  # noqa: E402

NAMES = ["opteq_digits", "opteq_cifar10_small_geq", "opteq_cifar10_small_mopteq"]
PRETRAINED = {"opteq_digits": "digits", "opteq_cifar10_176k": "cifar10-176k"}


def created(name, **options):
    torch.manual_seed(0)
    return timm.create_model(name, **options)


def images(model, batch=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, *model.pretrained_cfg["input_size"], generator=generator)


def test_every_preset_that_classifies_images_is_listed():
    names = {
        f"opteq_{p.name}".replace("-", "_").replace(".", "_")
        for p in presets()
        if not p.name.startswith(("camvid", "cityscapes", "connected"))
        and "baselines" not in str(read_config(p.name)["model"])
    }
    assert set(timm.list_models("opteq_*")) == names
    assert timm.list_models("opteq_*", pretrained=True) == sorted(f"{name}.opteq" for name in PRETRAINED)


@pytest.mark.parametrize("name", NAMES)
def test_forward(name):
    model = created(name).eval()
    logits = model(images(model))
    assert logits.shape == (2, model.num_classes) == (2, model.pretrained_cfg["num_classes"])
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_backward_reaches_every_parameter(name):
    model = created(name, num_classes=7).train()
    model(images(model, 3)).mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_classifier_can_be_replaced_or_left_out(name):
    model = created(name).eval()
    x = images(model)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    assert pooled.shape == (2, model.num_features) == (2, model.head_hidden_size)
    assert model.get_classifier().weight.shape == (model.num_classes, model.num_features)
    torch.testing.assert_close(model.get_classifier()(pooled), model(x))
    model.reset_classifier(3)
    assert (model(x).shape, model.num_classes) == ((2, 3), 3)
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), pooled)
    torch.testing.assert_close(created(name, num_classes=0).eval()(x), pooled)


@pytest.mark.parametrize("name", NAMES)
def test_features_have_the_channels_and_sizes_that_are_told(name):
    model = created(name, features_only=True).eval()
    x = images(created(name))
    features = model(x)
    assert [f.shape[1] for f in features] == model.feature_info.channels()
    assert [x.shape[2] // f.shape[2] for f in features] == model.feature_info.reduction()
    whole = created(name).eval()
    torch.testing.assert_close(features[0], whole.stem(x))
    final, _ = whole.forward_intermediates(x)
    torch.testing.assert_close(whole.forward_head(final), whole(x))


def test_all_branches_are_features():
    model = created("opteq_cifar10_small_mopteq", features_only=True, out_indices=(1, 2)).eval()
    assert [tuple(f.shape[2:]) for f in model(torch.randn(1, 3, 32, 32))] == [(16, 16), (8, 8)]


@pytest.mark.parametrize(("name", "preset"), PRETRAINED.items())
def test_pretrained_weights(name, preset):
    model = created(name, pretrained=True).eval()
    x = images(model)
    torch.testing.assert_close(model(x), opteq.load(preset)(x), rtol=0, atol=0)
    cfg = model.pretrained_cfg
    parameters = dict(model.named_parameters())
    assert f"{cfg['first_conv']}.weight" in parameters
    assert parameters[f"{cfg['classifier']}.weight"] is model.get_classifier().weight
    assert timm.data.resolve_model_data_config(model)["mean"] == cfg["mean"]


def test_pretrained_weights_for_other_images_and_classes():
    model = created("opteq_cifar10_176k", pretrained=True, num_classes=5, in_chans=1).eval()
    own = opteq.load("cifar10-176k")
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 5)
    torch.testing.assert_close(model.stem[0][0].weight, own.stem[0][0].weight.sum(1, keepdim=True))
    torch.testing.assert_close(model.body.map.W.weight, own.body.map.W.weight)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    file = tmp_path / "other.safetensors"
    weights = opteq.load("digits").state_dict()
    weights["head.4.bias"] = weights["head.4.bias"] / 0
    save_file(weights, file)
    with pytest.raises(NonFiniteError, match=rf"^{file} holds weights that are NaN or inf.* head\.4\.bias"):
        created("opteq_digits", pretrained=True, pretrained_cfg_overlay={"file": str(file)})
    with pytest.raises(NonFiniteError, match=r"^The state dict holds weights that are NaN or inf"):
        created("opteq_digits", checkpoint_path=str(file))
