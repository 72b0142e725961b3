"""Networks on the Hugging Face hub, or in folders as they lie there; it needs `pip install opteq[hub]`."""

import json
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import ModelCard as Readme
from huggingface_hub import PyTorchModelHubMixin, snapshot_download
from torch import Tensor, nn

from opteq.models.loading import CARD, WEIGHTS, ModelCard, folder_of, load, save_network
from opteq.options import check_kind
from opteq.training.summary import SUMMARY

_README = """---
{{ card_data }}
---

# {{ title }}

An optimization-induced equilibrium model, trained with [opteq](https://pypi.org/project/opteq/): its features
are the optimum of an objective, and each prediction comes with the residual that it was solved to.

```python
from opteq.hub import HubModel

model = HubModel.from_pretrained("{{ repo_id }}")
logits = model(images)   # {{ images }}
```

The folder is a run of opteq's as well: `opteq.load(FOLDER)`, `opteq predict FOLDER IMAGES`.

{{ numbers }}
"""


class HubModel(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="opteq",
    pipeline_tag="image-classification",
    tags=["deep-equilibrium-model", "implicit-layers"],
    model_card_template=_README,
):
    """A trained network with what its images have to be: `from_pretrained`, `save_pretrained`, `push_to_hub`.

    What is saved is what `opteq.load` reads, weights as safetensors and a card in JSON, and a `README.md`
    with the measured numbers. As there, only classes of opteq and modules of `torch.nn` are built unless the
    folder is trusted: `from_pretrained(..., trust=True)`.

    Args:
        network: the network, for images normalised as its card says.
        card: what it takes and what its logits stand for.
        measured: the numbers of its run, as in its `summary.json`.
    """

    def __init__(self, network: nn.Module, card: ModelCard, measured: dict[str, Any] | None = None) -> None:
        super().__init__()
        check_kind(nn.Module, "network", network, "a torch module")
        check_kind(ModelCard, "card", card, "what ModelCard.read gives")
        self.network, self.card, self.measured = network, card, measured or {}

    @classmethod
    def from_run(cls, run: str | Path, trust: bool = False) -> Self:
        """The network of a finished run, or a pretrained one.

        Args:
            run: folder of the run, or a name in `opteq.models.loading.pretrained()`.
            trust: whether to import and build any class that it names.

        Raises:
            ConfigError: as `opteq.load`.
        """
        summary = folder_of(run) / SUMMARY
        measured = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}
        return cls(load(run, trust), ModelCard.read(run), measured).eval()

    def forward(self, images: Tensor) -> Tensor:
        """Logits of normalised images `(batch, in_channels, H, W)`."""
        return self.network(images)

    def generate_model_card(self, *args: Any, repo_id: str = "FOLDER", **kwargs: Any) -> Readme:
        """The `README.md`, with the numbers of the run.

        Args:
            args: unused.
            repo_id: what `from_pretrained` is to be given.
            kwargs: other values of the template.
        """
        card = self.card
        mean, std = (", ".join(f"{value:.3f}" for value in values) for values in (card.mean, card.std))
        height, width = [card.image_size] * 2 if isinstance(card.image_size, int) else card.image_size
        images = (
            f"(batch, {card.in_channels}, {height}, {width}), scaled to [0, 1], less [{mean}], over [{std}]"
        )
        rows = [f"| {name} | {value} |" for name, value in self.measured.items() if _is_shown(value)]
        numbers = (
            "\n".join(["| measured | |", "| --- | --- |", *rows]) if rows else "Its run left no numbers."
        )
        title = self.measured.get("model", type(self.network).__name__)
        kwargs = {"title": title, "images": images, "numbers": numbers, "repo_id": repo_id, **kwargs}
        return super().generate_model_card(*args, **kwargs)

    def _save_pretrained(self, save_directory: Path) -> None:
        # The mixin writes what is measured, in its config.json.
        save_network(save_directory, self.network, self.card)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        measured: dict[str, Any] | None = None,
        trust: bool = False,
        map_location: str | torch.device = "cpu",
        **source: Any,
    ) -> Self:
        folder = model_id
        if not Path(folder).is_dir():
            folder = snapshot_download(model_id, allow_patterns=[CARD, WEIGHTS], **source)
        return cls(load(folder, trust), ModelCard.read(folder), measured).to(map_location).eval()


def _is_shown(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
