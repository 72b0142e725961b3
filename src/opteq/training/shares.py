"""Which samples of a batch count, so that several processes together count what one would."""

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from opteq.errors import ConfigError


def own_samples(loader: Any, batch_idx: int, size: int) -> slice:
    """The samples of a batch that no other process has as well, the first ones.

    A `DistributedSampler` deals images out in turn, and makes up for what is left over with images that it
    has dealt out before: the last ones of some processes.

    Args:
        loader: Where the batch is from.
        batch_idx: The number of the batch.
        size: How many samples it has.

    Raises:
        ConfigError: There is not an image for every process.
    """
    sampler = getattr(loader, "sampler", None)
    if not (isinstance(loader, DataLoader) and isinstance(sampler, DistributedSampler)):
        return slice(size)
    count = len(sampler.dataset)  # pyright: ignore[reportArgumentType]
    if count < sampler.num_replicas:
        raise ConfigError(
            f"{count} images cannot be dealt out among {sampler.num_replicas} processes; lower "
            "--trainer.devices and --trainer.num_nodes."
        )
    own = len(range(sampler.rank, count, sampler.num_replicas))
    return slice(max(0, min(size, own - batch_idx * (loader.batch_size or size))))
