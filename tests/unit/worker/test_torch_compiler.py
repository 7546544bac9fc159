"""A worker trains without torch's compiler, and still has it if something needs it."""

from __future__ import annotations

import subprocess
import sys

PRELUDE = """
import sys
import torch
from ravnest.worker.torch_compiler import defer_compiler
defer_compiler()
"""
OPTIMIZERS = """
for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam):
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = make([weight], lr=0.1)
    weight.grad = torch.ones(3, 3)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert weight.max() < 1
assert "torch._dynamo.eval_frame" not in sys.modules
"""
COMPILED = """
double = torch.compile(lambda x: x * 2, backend="eager")
assert double(torch.ones(2)).tolist() == [2.0, 2.0]
import torch._dynamo.config
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert sys.modules["torch._dynamo"] is torch._dynamo
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_optimizers_do_not_import_the_compiler() -> None:
    run(OPTIMIZERS)


def test_the_compiler_works_when_it_is_used() -> None:
    run(OPTIMIZERS + COMPILED)
