"""pfl (Apple's pfl-research): its simulated backend with FederatedAveraging, FedProx or SCAFFOLD.

`--threads 1`: one process; `--threads 2`: two, started by torchrun (see speed.py), which share a cohort by gloo.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from work import BATCH, LR, MU, Watch, accuracy, network, order, rows, table, weighted_loss, weights

task = order()
work = task.work
torch.set_num_threads(1)
random.seed(0)
np.random.seed(0)  # all processes must draw the same cohorts
x, y = (column.to(task.device) for column in table(task.folder, work.data, "train"))
mine = rows(work).to(task.device)
row_weights = weights(work).to(task.device) if work.method == "feddisk" else None
totals: list[Any] = [0, 0.0]  # steps, sum of losses


class Net(nn.Module):
    """The network as pfl wants it: with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(work.model).to(task.device)

    def loss(self, inputs: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
        outputs = self.net(inputs)
        loss = cross_entropy(outputs, targets) if weight is None else weighted_loss(outputs, targets, weight)
        totals[0] += 1
        totals[1] += loss.detach()  # no step waits for the device
        return loss

    def metrics(self, *_: Tensor) -> dict[str, Any]:
        return {}


class RoundWatch(TrainingProcessCallback):
    """Says when a round has ended."""

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        sums = torch.tensor([float(totals[0]), float(totals[1])])
        if ops.distributed.world_size > 1:
            torch.distributed.all_reduce(sums)
        steps, total = sums.tolist()
        totals[:] = [0, 0.0]
        if ops.distributed.global_rank == 0:
            watch.tick(int(steps), total / max(1, steps))
        return False, Metrics()


def dataset(user: int) -> PyTorchTensorDataset:
    """A user's rows, in a new order: pfl does not shuffle."""
    at = torch.randperm(work.images, device=task.device)
    batch = mine[user][at]
    columns = (x[batch], y[batch]) if row_weights is None else (x[batch], y[batch], row_weights[user][at])
    return PyTorchTensorDataset(columns, user_id=str(user))


watch = Watch()
net = Net()
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
ops = get_framework_module()
order_of_users = iter(lambda: random.sample(range(work.clients), work.sampled), None)
queue: list[int] = []


def next_user() -> int:
    """Each round another choice of users, none of them twice."""
    if not queue:
        queue.extend(next(order_of_users))
    return queue.pop()


data = FederatedDataset(dataset, next_user)
common = {
    "central_num_iterations": work.rounds,
    "evaluation_frequency": 10**6,
    "train_cohort_size": work.sampled,
    "val_cohort_size": 0,
}
if work.method == "fedprox":
    algorithm, params = FedProx(), FedProxParams(**common, mu=MU)
elif work.method == "scaffold":
    store = InMemoryUserStateStorage()
    options = {"population": work.clients, "use_gradient_as_control_variate": False, "user_state_storage": store}
    algorithm, params = SCAFFOLD(), SCAFFOLDParams(**common, **options)
else:
    algorithm, params = FederatedAveraging(), NNAlgorithmParams(**common)
local = NNTrainHyperParams(local_learning_rate=LR, local_num_epochs=1, local_batch_size=BATCH)
algorithm.run(params, SimulatedBackend(data, data), model, local, None, [RoundWatch()], send_metrics_to_platform=False)
if ops.distributed.global_rank == 0:
    watch.end(accuracy=accuracy(net.net, task.folder, work.data))
if ops.distributed.world_size > 1:
    torch.distributed.barrier()  # none ends while another still measures
    torch.distributed.destroy_process_group()
