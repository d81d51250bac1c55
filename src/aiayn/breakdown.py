"""Where the time of a training step goes, by torch's profiler: forward and backward of each kind of work together."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from aiayn.attention import MemoryAttention, SelfAttention
from aiayn.batching import epoch_plan, gather
from aiayn.contest import computing, synthetic_pairs
from aiayn.evaluate import build
from aiayn.linear import Linear
from aiayn.loss import label_smoothed_cross_entropy
from aiayn.schema import Config
from aiayn.sheets import Sheet
from aiayn.transformer import AddAndNorm, LearnedPositions, Sinusoids

PRODUCTS, ATTENTION, LOSS = "matrix products", "attention", "softmax and loss"
NORMS, OPTIMISER, EMBEDDING = "norms, dropout, residual", "optimiser", "embedding, positions"
PACKING, REST, PYTHON = "packing", "rest", "Python and torch between the operators"
GROUPS = (PRODUCTS, ATTENTION, LOSS, NORMS, OPTIMISER, EMBEDDING, PACKING, REST, PYTHON)
# The innermost scope that an operator stands in decides: a product inside attention is a product
SCOPES: dict[type[nn.Module], str] = {
    Linear: PRODUCTS,
    SelfAttention: ATTENTION,
    MemoryAttention: ATTENTION,
    AddAndNorm: NORMS,
    nn.Embedding: EMBEDDING,
    LearnedPositions: EMBEDDING,
    Sinusoids: EMBEDDING,
}
BACKWARD = "autograd::engine::evaluate_function"
WARM_UP, STEPS = 3, 5


def breakdown(run: Config, precision: str, device: str) -> dict[str, Any]:
    """Milliseconds of a step in each group, and of the whole step with and without the profiler."""
    pairs = synthetic_pairs(
        run, 100 + int(2 * (WARM_UP + STEPS) * run.training.tokens_per_update / run.bench.mean_length)
    )
    lengths = pairs.source_lengths, pairs.target_lengths
    plan = list(epoch_plan(*lengths, run.training.tokens_per_update, run.seed, epoch=0))
    model = build(run, run.data.vocab_size).to(device).train()
    adam = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def step(number: int) -> None:
        with record_function(PACKING):
            batch = gather(pairs, plan[number % len(plan)]).to(device)
        with record_function(OPTIMISER):
            adam.zero_grad()
        with record_function(PACKING):  # whatever a module inside does not call its own
            hidden = model.hidden(batch, (run.seed, number))
        with record_function(LOSS):
            loss, _ = label_smoothed_cross_entropy(
                hidden, model.embedding.weight, batch.target, run.training.label_smoothing
            )
            loss = loss / len(batch.target)
        loss.backward()  # type: ignore[no-untyped-call]
        with record_function(OPTIMISER):
            adam.step()

    def steps(first: int, count: int) -> float:
        _settle(device)
        began = time.perf_counter()
        for number in range(first, first + count):
            step(number)
        _settle(device)
        return (time.perf_counter() - began) / count

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with computing(precision, device, training=True):
        steps(0, WARM_UP)
        plain = steps(WARM_UP, STEPS)
        with scopes(model), profile(activities=activities) as profiler:
            watched = steps(WARM_UP, STEPS)
    found = dict.fromkeys(GROUPS, 0.0)
    for group, seconds in attributed(list(profiler.events()), device == "cuda"):
        found[group] += seconds / STEPS
    found[PYTHON] = max(0.0, watched - sum(found.values()))
    return {
        "precision": precision,
        "milliseconds": {group: 1000 * seconds for group, seconds in found.items()},
        "step_milliseconds": 1000 * plain,
        "profiled_step_milliseconds": 1000 * watched,
        "updates": STEPS,
    }


@contextlib.contextmanager
def scopes(model: nn.Module) -> Iterator[None]:
    """Inside the block the profiler sees the modules of SCOPES under the names of their groups."""
    hooks = contextlib.ExitStack()
    for module in model.modules():
        group = next((name for kind, name in SCOPES.items() if type(module) is kind), None)
        if group:
            open_ones: list[Any] = []

            def enter(module: nn.Module, inputs: Any, group: str = group, open_ones: list[Any] = open_ones) -> None:
                open_ones.append(record_function(group).__enter__())  # type: ignore[no-untyped-call]

            def leave(module: nn.Module, inputs: Any, output: Any, open_ones: list[Any] = open_ones) -> None:
                open_ones.pop().__exit__(None, None, None)

            for handle in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave)):
                hooks.callback(handle.remove)
    with hooks:
        yield


def attributed(events: list[Any], on_device: bool) -> Iterator[tuple[str, float]]:
    """For each operator its group and the seconds that it took itself.

    An operator of the backward pass belongs where its sequence number stood in the forward pass.
    """
    of_sequence: dict[int, str] = {}
    forward = [event for event in events if not _backward(event)]
    for event in sorted(forward, key=lambda event: event.time_range.start):
        if event.sequence_nr >= 0 and event.name not in GROUPS:
            of_sequence[event.sequence_nr] = _scope(event)
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        node = _backward(event)
        group = of_sequence.get(node.sequence_nr, REST) if node else _scope(event)
        microseconds = event.self_device_time_total if on_device else event.self_cpu_time_total
        if event.name not in GROUPS and not event.name.startswith(BACKWARD):
            yield group, microseconds / 1e6


def sheet(found: list[dict[str, Any]]) -> Sheet:
    """The shares as a table, a column for each precision."""
    rows = []
    for group in GROUPS:
        cells = []
        for column in found:
            share = column["milliseconds"][group] / sum(column["milliseconds"].values())
            cells += [f"{share:.1%}", f"{share * column['step_milliseconds']:,.1f}"]
        rows.append([group, *cells])
    head = ["", *(f"{column['precision']} {what}" for column in found for what in ("share", "ms"))]
    remarks = [
        f"{column['precision']}: {column['step_milliseconds']:,.1f} ms a step without the profiler, by which ms is the"
        f" share; {column['profiled_step_milliseconds']:,.1f} with it"
        for column in found
    ]
    return Sheet("where the time of a training step goes", head, rows, remarks)


def _backward(event: Any) -> Any:
    """The outermost backward node that an event stands in, if any."""
    found = None
    while event is not None:
        if event.name.startswith(BACKWARD):
            found = event
        event = event.cpu_parent
    return found


def _scope(event: Any) -> str:
    while event is not None:
        if event.name in GROUPS:
            return str(event.name)
        event = event.cpu_parent
    return REST


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
