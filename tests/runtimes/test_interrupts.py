"""Ctrl-C and SIGTERM end a run, whatever the code they interrupt makes of it."""

import os
import signal
from contextlib import suppress

import pytest

from kilter.federate import federate
from kilter.methods.fedavg import FedAvg
from kilter.records.run_folder import Store
from kilter.runtimes.interrupts import check, stoppable
from kilter.train import SGD
from small import mlp_task


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts(kind):
    before = signal.getsignal(kind)
    with pytest.raises(KeyboardInterrupt), stoppable():
        os.kill(os.getpid(), kind)
    assert signal.getsignal(kind) is before


def test_an_error_the_interrupt_caused_is_the_interrupt():
    with pytest.raises(KeyboardInterrupt), stoppable():
        break_while_interrupted()


def break_while_interrupted() -> None:
    swallow()
    raise RuntimeError("trying to pop from empty mode stack")


def swallow() -> None:
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_other_errors_stay_what_they_are_and_an_interrupt_is_forgotten_afterwards():
    with pytest.raises(KeyboardInterrupt), stoppable():
        signal.raise_signal(signal.SIGINT)
    check()
    with pytest.raises(ZeroDivisionError), stoppable():
        raise ZeroDivisionError


def test_a_round_that_swallowed_an_interrupt_is_not_written_down(fed, tmp_path):
    class Deaf(FedAvg):
        def round(self, fed, state):
            if fed.round == 2:
                swallow()
            return super().round(fed, state)

    store = Store(tmp_path)
    deaf = Deaf(task=mlp_task(), local=SGD(lr=0.1))
    with pytest.raises(KeyboardInterrupt), stoppable():
        federate(deaf, fed, 3, store=store)
    assert [r.round for r in store.rounds()] == [0, 1]
