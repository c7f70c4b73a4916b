"""Loaded once into the process that the tests' processes are forked from: one thread each, and the digits read."""

import torch

import kilter.net.entry
from kilter import data

torch.set_num_threads(1)
data.load("digits")
assert kilter.net.entry
