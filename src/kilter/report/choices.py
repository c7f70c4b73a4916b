"""What a run chose by itself, in plain words, and how to change it."""

from __future__ import annotations

from kilter.data import Dataset
from kilter.experiment import CLIENTS, DIVIDED, Experiment
from kilter.methods import find
from kilter.records.display import counted


def choices(experiment: Experiment, dataset: Dataset) -> list[str]:
    """The first lines of a run."""
    shape = tuple(dataset.x.shape[1:])
    rule = experiment.partition_of(dataset)
    if experiment.model == "auto":
        model = experiment.model_of(shape, dataset.task)
        what = "tables" if len(shape) == 1 else f"images of {shape[1]}x{shape[2]} pixels"
        if "transformer" in model:
            what = "sequences of tokens"
        if model == "temporal-cnn":
            what = f"time series of {shape[1]} steps and {shape[0]} channels"
        lines = [f"Model: {model}, for {what}. Change it with --model."]
    else:
        lines = [f"Model: {experiment.model}."]
    if rule == "natural":
        count = experiment.clients or len(dataset.group_names)
        named = f"the {count}" if count > 1 else "the one"
        lines.append(f"Clients: {named} that the data names. Change them with --partition and --clients.")
    elif rule == DIVIDED:
        count = experiment.clients or CLIENTS
        lines.append(f"Clients: {count}, with labels divided by {rule}. Change them with --partition and --clients.")
    plan = experiment.local
    lines.append(
        f"Training: {experiment.optimiser}, learning rate {plan['lr']:g}, {counted(plan['epochs'], 'epoch')} "
        f"in each of {counted(experiment.rounds, 'round')} (--lr, --epochs, --rounds)."
    )
    needs = find(experiment.method).needs
    if "everyone" in needs:
        lines.append(f"Topology: {experiment.topology}, because {experiment.method} needs links between all nodes.")
    if "public" in needs and experiment.public:
        lines.append(
            f"Public rows: {experiment.public} of each class are set aside for the aggregator, because {experiment.method} "
            "needs some. Change it with --public or --public-file."
        )
    return lines
