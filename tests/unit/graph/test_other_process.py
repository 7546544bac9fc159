"""Stages trained in other processes from stage file and weights alone, without any code of the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import zoo
from benchmarks.zoo import Case
from ravnest.graph import dump, legal_cuts, read_weights, split, stage_weights, trace
from tests.unit.graph.pipeline import eager_step, thirds

pytestmark = pytest.mark.slow

WORKER = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from ravnest.graph import Interpreter, Tape, load, read_weights

torch.set_num_threads(1)
folder = Path(sys.argv[1])
stage = load((folder / "stage.json").read_bytes())
state = read_weights(stage, folder / "weights.safetensors")
state.update((s.target, load_file(folder / "borrowed.safetensors")[s.target]) for s in stage.borrowed)
for item in stage.parameters:
    state[item.target].requires_grad_(item.trainable)
given = load_file(folder / "inputs.safetensors")
inputs = [int(given[v.name]) if v.number is not None else given[v.name] for v in stage.inputs]
tape = Tape(Interpreter(stage), state, inputs)
outputs = {v.name: torch.as_tensor(o).contiguous() for v, o in zip(stage.outputs, tape.outputs)}
save_file(outputs, folder / "outputs.safetensors")
print("forward", flush=True)
sys.stdin.readline()
back = load_file(folder / "gradients.safetensors") if stage.index < stage.count - 1 else None
gradients = tape.backward(back and [back.get(v.name) for v in stage.outputs])
sent = {v.name: g.contiguous() for v, g in zip(stage.inputs, gradients) if g is not None}
save_file(sent, folder / "input_gradients.safetensors")
save_file({n: t.grad for n, t in state.items() if t.grad is not None}, folder / "parameter_gradients.safetensors")
strangers = ("transformers", "torchvision", "benchmarks", "tests")
foreign = [m for m in sys.modules if m.split(".")[0] in strangers or "examples" in m]
assert not foreign, foreign
"""


@pytest.mark.parametrize(
    "make", [lambda: zoo.gpt(tied=True), pytest.param(zoo.llama, marks=pytest.mark.soak)], ids=["gpt_tied", "llama"]
)
def test_stages_in_processes_of_their_own(make: object, tmp_path: Path) -> None:
    case: Case = make()  # type: ignore[operator]
    torch.manual_seed(0)
    model = case.build().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # each process draws its own random numbers
    program = trace(model, case.loss, case.batch(2))
    stages = split(program, thirds(legal_cuts(program)))
    folders = [tmp_path / str(stage.index) for stage in stages]
    values = dict(zip((v.name for v in program.inputs), program.feed(case.batch(2)), strict=True))
    workers = []
    for stage, folder in zip(stages, folders, strict=True):
        folder.mkdir()
        (folder / "stage.json").write_bytes(dump(stage))
        save_file(stage_weights(program, stage), folder / "weights.safetensors")
        save_file(
            {s.target: program.tensors[s.target].detach() for s in stage.borrowed}, folder / "borrowed.safetensors"
        )
        save_file({v.name: values[v.name] for v in stage.inputs}, folder / "inputs.safetensors")
        command = [sys.executable, "-c", WORKER, str(folder)]
        worker = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        workers.append(worker)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "forward\n"
        values.update(load_file(folder / "outputs.safetensors"))
    gradients: dict[str, torch.Tensor] = {}
    for stage, folder, worker in reversed(list(zip(stages, folders, workers, strict=True))):
        if stage.index < len(stages) - 1:
            (folder / "gradients.safetensors").write_bytes(
                (folders[stage.index + 1] / "input_gradients.safetensors").read_bytes()
            )
        worker.communicate("\n", timeout=60)
        assert worker.returncode == 0
        for name, gradient in load_file(folder / "parameter_gradients.safetensors").items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    reference = eager_step(case, model, case.batch(2))
    assert torch.equal(values["loss"], reference.outputs[0])
    assert [n for n, g in reference.gradients.items() if not torch.equal(g, gradients[n])] == []
    assert read_weights(stages[0], folders[0] / "weights.safetensors")
