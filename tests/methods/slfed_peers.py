"""A few peers of SLFed, for tests."""

from kilter import federate
from kilter.methods.slfed import SLFed
from kilter.runtimes.simulation import Simulation
from kilter.train import SGD
from small import bench, mlp_task, skewed

PEERS = 6


def method(**fields):
    """So few peers find three contributors too rarely: two are enough here."""
    small = {"pictures": 60, "gan_epochs": 1, "fewest": 2, "largest_share": 1.0}
    return SLFed(task=mlp_task(), local=SGD(lr=0.05, batch=16), **small | fields)


def run(rounds=2, faults=None, workers=1, **fields):
    with Simulation(skewed(PEERS), bench=bench(), topology="full", faults=faults, workers=workers) as fed:
        result = federate(method(**fields), fed, rounds)
        return result, fed.states


def models(states):
    return {i: s["w"] for i, s in states.items() if "w" in s}


def chosen(node, box, **fields):
    method(**fields).choose(node, box)
    return node.state["known"]
