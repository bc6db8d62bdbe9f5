"""Leased data loading: the batches of an epoch, shared out while it goes on; splits."""

from pswire.leased_data import EpochReport, EpochShape
from psworker.data.counted import CountedLoader
from psworker.data.loader import LeasedLoader, prepare_loader
from psworker.data.order import LoaderRefused
from psworker.data.source import DataSource
from psworker.data.split_value import Parts, Split, SplitRecipe
from psworker.data.splitting import split
from psworker.transport.values import Lease, LeaseRequest

__all__ = [
    "CountedLoader",
    "DataSource",
    "EpochReport",
    "EpochShape",
    "Lease",
    "LeaseRequest",
    "LeasedLoader",
    "LoaderRefused",
    "Parts",
    "Split",
    "SplitRecipe",
    "prepare_loader",
    "split",
]
