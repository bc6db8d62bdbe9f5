"""Leased data loading: the batches of an epoch, shared out while it goes on."""

from psworker.data.counted import CountedLoader
from psworker.data.loader import LeasedLoader, prepare_loader
from psworker.data.order import EpochShape, LoaderRefused
from psworker.data.source import DataSource, Lease, LeaseRequest
from psworker.epoch_report import EpochReport

__all__ = [
    "CountedLoader",
    "DataSource",
    "EpochReport",
    "EpochShape",
    "Lease",
    "LeaseRequest",
    "LeasedLoader",
    "LoaderRefused",
    "prepare_loader",
]
