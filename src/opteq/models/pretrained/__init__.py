"""The networks whose weights come with opteq: a folder each, with what `opteq.models.loading` reads."""

from pathlib import Path

FOLDER = Path(__file__).parent
CARD = "model.json"


def pretrained() -> list[str]:
    """Names of the networks whose weights come with opteq, each that of the preset it was trained by."""
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{CARD}"))
