"""Loaded once into the process that the tests' processes are forked from: one thread each, and the digits read."""

import torch

import kilter.net.dry_run
import kilter.net.peer_run
import kilter.net.server_run
import kilter.net.site_client
from kilter import data

torch.set_num_threads(1)
data.load("digits")
assert kilter.net.dry_run
