"""What training code imports: finished versions as torch datasets and loaders."""

from pipeline.readers.batch import Batch, Item
from pipeline.readers.dataset import OlaDataset, open_dataset
from pipeline.readers.loader import Loader
from pipeline.store.catalog import DatasetEntry, list_datasets

__all__ = ["Batch", "DatasetEntry", "Item", "Loader", "OlaDataset", "list_datasets", "open_dataset"]
