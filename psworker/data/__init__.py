"""Leased data loading: the batches of an epoch, shared out while it goes on."""

from psworker.data.loader import CountedLoader, LeasedLoader, prepare_loader
from psworker.data.order import EpochShape, LoaderRefused
from psworker.data.source import DataSource, Lease, LeaseRequest

__all__ = [
    "CountedLoader",
    "DataSource",
    "EpochShape",
    "Lease",
    "LeaseRequest",
    "LeasedLoader",
    "LoaderRefused",
    "prepare_loader",
]
