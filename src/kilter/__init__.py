"""Kilter: federated learning for data that is off kilter."""

from kilter.core import Data, Each, Federation, Fit, Mail, Method, Node, Post, Replies, Rows, step
from kilter.errors import Mistake
from kilter.federate import Result, federate
from kilter.records.run_folder import Store
from kilter.runtimes.simulation import Simulation
from kilter.tasks import Task
from kilter.train import SGD, Adam, Plan

__version__ = "0.1.0"
__all__ = [
    "SGD",
    "Adam",
    "Data",
    "Each",
    "Federation",
    "Fit",
    "Mail",
    "Method",
    "Mistake",
    "Node",
    "Plan",
    "Post",
    "Replies",
    "Result",
    "Rows",
    "Simulation",
    "Store",
    "Task",
    "federate",
    "step",
]
