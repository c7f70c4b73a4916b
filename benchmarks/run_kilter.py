"""Kilter: the same methods as `kilter run`, on the benchmark's rows and network; `--threads` is the number of worker processes."""

from __future__ import annotations

import torch

from kilter.core import Data, Rows
from kilter.methods import find
from kilter.runtimes.simulation import Simulation
from kilter.tasks import Task
from kilter.train import SGD
from work import BATCH, LR, MU, Watch, accuracy, network, order, rows, table, weights


def main() -> None:
    request = order()
    work = request.work
    x, y = table(request.folder, work.data, "train")
    nothing = Rows({"x": x, "y": y}, torch.empty(0, dtype=torch.int64))
    held = [Rows({"x": x, "y": y}, own) for own in rows(work)]
    if work.method == "feddisk":  # FedAvg on rows that weigh: what FedDisk's rounds are once it knows the weights
        held = [own.extend(weight=w) for own, w in zip(held, weights(work), strict=True)]
    clients = {f"c{k:05d}": Data(own, nothing, nothing) for k, own in enumerate(held)}
    task = Task(network(work.model))
    kind = find("fedavg" if work.method == "feddisk" else work.method)
    settings = {"mu": MU} if work.method == "fedprox" else {}
    plan = SGD(lr=LR, batch=BATCH)
    method = kind(task=task, local=plan, cohort=work.sampled / work.clients, **settings)
    watch = Watch()
    with Simulation(clients, workers=request.threads, device=request.device, precision=request.precision) as fed:
        # The loop of `federate` without its evaluation.
        fed.bind(method)
        state = method.setup(fed)
        for fed.round in range(1, work.rounds + 1):
            state = method.round(fed, state)
            record = fed.ledger.close()
            watch.tick(record.steps, record.loss)
    watch.end(accuracy=accuracy(task.load(method.model(state)), request.folder, work.data))


if __name__ == "__main__":
    main()
