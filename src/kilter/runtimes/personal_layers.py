"""Layers that stay at their node (`--personal head.*`), for every method that pools models.

The method sees only the shared layers: its state, its messages and its averages do not contain the others. When a step asks for a
fit of the shared layers, the node's own layers are added, trained with them and kept in the node's state.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import isgenerator

from torch import Tensor

from kilter.core import Fit, Method, Node, Params, Step, Tree
from kilter.params import drop, pick

KEPT = "~personal"  # where a node keeps its own layers


def own_layers(method: Method, node: Node) -> Params:
    """This node's own layers: those it trained, or the initial ones."""
    kept: Params | None = node.state.get(KEPT)
    return pick(method.task.init_whole(node.seed), method.task.personal) if kept is None else kept


def own_model(method: Method, node: Node, state: Tree) -> Params | None:
    """A node's own model, with the layers that stay there."""
    shared = method.personal_model(node, state)
    if not method.task.personal:
        return shared
    shared = method.model(state) if shared is None else shared
    return None if shared is None else {**shared, **own_layers(method, node)}


def own_outputs(method: Method, node: Node, state: Tree, x: Tensor) -> Tensor | None:
    """Outputs of a node's own model."""
    if not method.task.personal:
        return method.personal(node, state, x)
    model = own_model(method, node, state)
    return None if model is None else method.task.predict(model, x)


def with_personal_layers(method: Method, step: Step) -> Step:
    """The step of a method; a fit of the task's shared layers also trains the node's own layers."""
    personal = method.task.personal
    shared = frozenset(method.task.names.values()) - personal

    def stepped(node: Node, message: Tree) -> Tree:
        running = step(node, message)
        return _trained(running, node) if isgenerator(running) else running

    def _trained(running: Tree, node: Node) -> Tree:
        answer: Tree = None
        while True:
            try:
                request = running.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(request, Fit) and shared <= set(request.params) and not personal & set(request.params):
                params = {**request.params, **own_layers(method, node)}
                trained = yield replace(request, params=params)
                node.state[KEPT] = pick(trained, personal)
                answer = drop(trained, personal)
            else:
                answer = yield request

    return stepped
