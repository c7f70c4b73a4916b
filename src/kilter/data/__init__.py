"""Data sets, partition rules, splits and measures of their skew."""

from kilter.data.datasets import DATASETS, Dataset, load
from kilter.data.partitions import PARTITIONS
from kilter.data.split import Split, split

__all__ = ["DATASETS", "PARTITIONS", "Dataset", "Split", "load", "split"]
