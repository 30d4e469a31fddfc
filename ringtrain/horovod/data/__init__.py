"""`horovod.data`: loaders of batches that load ahead in a thread."""

from ringtrain.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
