"""What training code imports: finished versions as torch datasets and loaders."""

from pipeline.readers.batch import Batch, Item
from pipeline.readers.dataset import OlaDataset, open_dataset
from pipeline.readers.joined import JoinedDataset, join_datasets
from pipeline.readers.loader import Loader
from pipeline.store.catalog import DatasetEntry, list_datasets

__all__ = [
    "Batch", "DatasetEntry", "Item", "JoinedDataset", "Loader", "OlaDataset", "join_datasets", "list_datasets",
    "open_dataset",
]  # fmt: skip
