"""Every test process computes with one thread: the machine has few cores, and the same bits come out each time."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
