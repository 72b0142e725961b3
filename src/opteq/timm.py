"""The presets as models of timm: `import opteq.timm`, then `timm.create_model("opteq_cifar10_176k")`.

It needs `pip install opteq[timm]`. Every preset that classifies images by an equilibrium of opteq is there
under its name, with `_` for `-` and after `opteq_`; those with weights in the package are `pretrained`.
"""

import copy
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from safetensors import safe_open
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from opteq.configs import presets, read_config
from opteq.errors import ConfigError
from opteq.models.classifier import ImageClassifier
from opteq.models.loading import WEIGHTS, ModelCard, expect_weights, folder_of, pretrained
from opteq.models.parts import build, complete
from opteq.results import State, tensors_of

# What the data sets of the presets have: channels, height and width, classes.
_DATA = {
    "digits": (1, 8, 10),
    "fashion": (1, 28, 10),
    "cifar10": (3, 32, 10),
    "cifar100": (3, 32, 100),
    "imagenette": (3, 224, 10),
    "imagenet100": (3, 224, 100),
    "imagenet": (3, 224, 1000),
}

# What the papers compare with is no model of ours.
_BASELINES = "opteq.models.baselines."


class EquilibriumNet(ImageClassifier):
    """An `ImageClassifier` with what timm asks of its models.

    `forward_features` gives the equilibria, a tuple of them for several branches; the last layer of the head
    is the classifier. With `features_only=True` there are the features of the stem and the
    equilibria, with `out_indices` those of further branches.

    Args:
        preset: name of a preset.
        image_size: height and width that the sizes of features are told for; others may be used.
        num_classes: number of classes; 0 for the features that the classifier would read.
        in_chans: channels of the images.
    """

    head: nn.Sequential  # in every preset
    pretrained_cfg: dict[str, Any]  # set by timm

    def __init__(self, preset: str, image_size: int, num_classes: int = 10, in_chans: int = 3) -> None:
        network = read_config(preset)["model"]["network"]
        complete(network, in_chans, max(num_classes, 1))
        whole: ImageClassifier = build(network)
        super().__init__(whole.stem, whole.body, whole.head)
        self.image_size, self.in_chans, self.num_classes = image_size, in_chans, num_classes
        self.num_features = self.head_hidden_size = int(self.head[-1].in_features)  # type: ignore[arg-type]
        if not num_classes:
            self.reset_classifier(0)

    @cached_property
    def feature_info(self) -> list[dict[str, Any]]:
        """Channels and reduction of the stem's features and of each equilibrium."""
        weight = next(self.parameters())
        image = weight.new_zeros(1, self.in_chans, self.image_size, self.image_size)
        with torch.no_grad():
            features = _intermediates(copy.deepcopy(self).eval(), image)
        names = ["stem", *(f"body.{k}" for k in range(len(features) - 1))]
        return [
            {"num_chs": f.shape[1], "reduction": self.image_size // f.shape[2], "module": name}
            for f, name in zip(features, names, strict=True)
        ]

    def load_state_dict(self, state_dict: Mapping[str, Any], *options: bool, **named: bool) -> Any:
        """As in torch; timm's ways of loading end here.

        Raises:
            ConfigError: Weights are not of real numbers.
            NonFiniteError: Weights are NaN or infinite.
        """
        expect_weights(self, state_dict, "The state dict")
        return super().load_state_dict(state_dict, *options, **named)

    def get_classifier(self) -> nn.Module:
        """The layer from features to logits."""
        return self.head[-1]

    def reset_classifier(self, num_classes: int) -> None:
        """Put a new classifier in place; with 0 the model gives the features that it would read."""
        weight = next(self.parameters())
        new = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head[-1] = new.to(weight.device, weight.dtype)
        self.num_classes = num_classes

    def forward_features(self, x: Tensor) -> State:
        """The equilibria of the images, before the head."""
        return self.features(x)

    def forward_head(self, x: State, pre_logits: bool = False) -> Tensor:
        """Logits of equilibria, or with `pre_logits` what the classifier reads."""
        return nn.Sequential(*list(self.head)[:-1])(x) if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[State, list[Tensor]]:
        """The stem's features and the equilibria.

        Args:
            x: images.
            indices: which of them, a number for the last ones, None for all.
            norm: there is none.
            stop_early: the equilibria come last, so that there is nothing to leave out.
            output_fmt: "NCHW".
            intermediates_only: whether to leave out the features that the head reads, which come first.
        """
        if output_fmt != "NCHW":
            raise ConfigError(f'Features have the format "NCHW", got {output_fmt!r}.')
        features = _intermediates(self, x)
        taken, _ = feature_take_indices(len(features), indices)
        chosen = [features[k] for k in taken]
        equilibria = tuple(features[1:]) if len(features) > 2 else features[1]
        return chosen if intermediates_only else (equilibria, chosen)


def _intermediates(network: ImageClassifier, images: Tensor) -> list[Tensor]:
    features = network.stem(images)
    return [features, *tensors_of(network.body(features))]


def _entrypoint(name: str, preset: str, image_size: int) -> Callable[..., EquilibriumNet]:
    def create(pretrained: bool = False, **options: Any) -> EquilibriumNet:
        feature_cfg = {"feature_cls": "getter", "out_indices": (0, 1)}
        named = {"preset": preset, "image_size": image_size, "pretrained_filter_fn": _looked_at, **options}
        return build_model_with_cfg(EquilibriumNet, name, pretrained, feature_cfg=feature_cfg, **named)

    create.__name__ = create.__qualname__ = name
    return create


def _looked_at(weights: dict[str, Any], model: EquilibriumNet) -> dict[str, Any]:
    """The weights of a file that timm has read; beyond, nobody knows which one it was."""
    source = model.pretrained_cfg
    expect_weights(model, weights, source.get("file") or source.get("hf_hub_id") or "The state dict")
    return weights


def _default_cfg(preset: str, channels: int, image_size: int, classes: int) -> dict[str, Any]:
    shape = {"input_size": (channels, image_size, image_size), "num_classes": classes, "crop_pct": 1.0}
    if preset not in pretrained():
        return shape
    file = folder_of(preset) / WEIGHTS
    with safe_open(file, "pt") as weights:
        sizes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    kernels = [name for name, size in sizes.items() if name.startswith("stem.") and len(size) == 4]
    matrices = [name for name, size in sizes.items() if name.startswith("head.") and len(size) == 2]
    card = ModelCard.read(preset)
    return {
        **shape,
        "file": str(file),
        "mean": card.mean,
        "std": card.std,
        "label_names": card.class_names,
        "first_conv": kernels[0].removesuffix(".weight"),
        "classifier": matrices[-1].removesuffix(".weight"),
    }


default_cfgs: dict[str, Any] = {}


def _register() -> None:
    for preset in presets():
        kind, config = preset.name.partition("-")[0], read_config(preset.name)
        if kind not in _DATA or _BASELINES in config["model"]["network"]["init_args"]["body"]["class_path"]:
            continue
        channels, usual_size, classes = _DATA[kind]
        image_size = config["data"].get("init_args", {}).get("image_size", usual_size)
        name = f"opteq_{preset.name}".replace("-", "_").replace(".", "_")
        cfg = _default_cfg(preset.name, channels, image_size, classes)
        default_cfgs.update(generate_default_cfgs({f"{name}.opteq" if "file" in cfg else name: cfg}))
        register_model(_entrypoint(name, preset.name, image_size))


_register()
