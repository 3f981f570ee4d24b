"""Lets tests import the helpers that lie in the tests folder (`from zoo import zoo`), and has them compute on one thread:
a sum that is split over threads is added up in another order, and many tests compare bit for bit with workers of one."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.get_num_threads()  # the first use would else overwrite the number set next
torch.set_num_threads(1)
