"""Data sets, your own tables, partition rules, splits and measures of their skew."""

from kilter.data.catalog import DATASETS
from kilter.data.datasets import Dataset, load
from kilter.data.partitions import PARTITIONS
from kilter.data.preparation import Preparation
from kilter.data.schema import Column, Schema
from kilter.data.split import Split, split
from kilter.data.tables import TableOptions

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Column",
    "Dataset",
    "Preparation",
    "Schema",
    "Split",
    "TableOptions",
    "load",
    "split",
]
