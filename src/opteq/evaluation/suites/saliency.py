"""The suite `saliency`."""

from __future__ import annotations

import torch

from opteq.evaluation.display import displayable
from opteq.evaluation.passes import Spread, device_of, logits_of, share_of
from opteq.evaluation.record import Samples
from opteq.evaluation.saliency import grad_cam
from opteq.evaluation.suites.case import Case, Outcome
from opteq.evaluation.table import Table
from opteq.plots.saliency import draw_saliency

_SHOWN = 8


def saliency(case: Case) -> Outcome:
    """Which parts of a few images speak for their predictions."""
    loader = case.data.test_dataloader()
    shown = min(_SHOWN, case.options.images or _SHOWN)
    batches = list(Spread(loader, share_of(loader, shown)))
    images, labels = map(torch.cat, zip(*batches, strict=True))
    device = device_of(case.network)
    logits, _ = logits_of(case.network, [(images, labels)])
    maps = grad_cam(case.network, images.to(device)).cpu()
    confidences = torch.from_numpy(logits).softmax(1)
    samples = Samples(
        displayable(images, case.data.normalization),
        labels.numpy(),
        logits.argmax(1),
        confidences.amax(1).float().numpy(),
    )
    names = case.data.class_names
    found = []
    for label, predicted, confidence, m in zip(
        samples.labels, samples.predictions, samples.confidences, maps, strict=True
    ):
        row, column = divmod(int(m.argmax()), m.shape[1])
        # What share of the pixels holds half of the map, the strongest first.
        half = int((m.flatten().sort(descending=True).values.cumsum(0) < m.sum() / 2).sum()) + 1
        found.append(
            {
                "label": names[label],
                "prediction": names[predicted],
                "confidence": float(confidence),
                "peak": [row, column],
                "half": half / m.numel(),
            }
        )
    rows = [
        [
            i["label"],
            i["prediction"],
            f"{i['confidence']:.1%}",
            "{}, {}".format(*i["peak"]),
            f"{i['half']:.1%}",
        ]
        for i in found
    ]
    header = ["class", "prediction", "confidence", "peak (row, column)", "pixels that hold half"]
    table = Table(f"Grad-CAM of the predicted class of {len(images)} images", header, rows)
    return Outcome({"images": found}, [table], {"": draw_saliency(samples, maps.numpy(), names)})
