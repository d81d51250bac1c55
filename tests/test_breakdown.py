"""Where a step's time goes: every operator belongs to one kind of work, its backward pass to that of its forward."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from aiayn import breakdown, config, schema
from aiayn.breakdown import ATTENTION, GROUPS, NORMS, OPTIMISER, PRODUCTS, REST
from aiayn.dropout import RandomBits, layer_keys, random_bits
from aiayn.evaluate import build


@pytest.fixture
def run(toy) -> schema.Config:
    return config.compose_row(*toy, "bench.mean_length=5")


def event(name: str, microseconds: float, parent=None, sequence: int = -1, start: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        cpu_parent=parent,
        sequence_nr=sequence,
        time_range=SimpleNamespace(start=start),
        device_type=DeviceType.CPU,
        self_cpu_time_total=microseconds,
        self_device_time_total=10 * microseconds,
    )


def summed(events: list, on_device: bool = False) -> dict[str, float]:
    found = dict.fromkeys(GROUPS, 0.0)
    for group, seconds in breakdown.attributed(events, on_device):
        found[group] += 1e6 * seconds
    return {group: pytest.approx(value) for group, value in found.items() if value}


def test_the_innermost_scope_decides_and_backward_follows_forward():
    attention = event(ATTENTION, 1000)
    product = event(PRODUCTS, 1000, attention)
    inside = event("aiayn::product", 3, product, sequence=5, start=1)
    softmax = event("aten::softmax", 7, attention, sequence=6, start=2)
    below = event("aten::_softmax", 11, softmax, sequence=7, start=3)
    later = event("aten::add", 13, event(NORMS, 1000), sequence=7, start=4)  # the node that got number 7
    stray = event("aten::ones", 17)
    of_product = event(f"{breakdown.BACKWARD}: ProductBackward", 1000, sequence=5)
    of_softmax = event(f"{breakdown.BACKWARD}: SoftmaxBackward0", 1000, sequence=6)
    of_add = event(f"{breakdown.BACKWARD}: AddBackward0", 1000, sequence=7)
    backward = [
        event("aten::mm", 19, event("ProductBackward", 0, of_product, sequence=5)),
        event("aten::_softmax_backward_data", 23, of_softmax),
        event("aten::mul", 29, of_add),
        event("torch::autograd::AccumulateGrad", 31, event(f"{breakdown.BACKWARD}: AccumulateGrad", 1000)),
    ]
    scopes = [attention, product, of_product, of_softmax, of_add]
    found = summed([*scopes, inside, softmax, below, later, stray, *backward])
    assert found == {PRODUCTS: 3 + 19, ATTENTION: 7 + 11 + 23, NORMS: 13 + 29, REST: 17 + 31}
    assert summed([inside], on_device=True) == {PRODUCTS: 30}


def test_in_a_real_step_every_kind_of_work_is_found_and_all_together_are_the_step(run):
    found = breakdown.breakdown(run, "fp32", "cpu")
    milliseconds = found["milliseconds"]
    assert set(milliseconds) == set(GROUPS)
    assert all(value > 0 for value in milliseconds.values())
    assert sum(milliseconds.values()) == pytest.approx(found["profiled_step_milliseconds"])
    table = breakdown.sheet([found, {**found, "precision": "bf16"}])
    assert [row[0] for row in table.rows] == list(GROUPS)
    assert sum(float(row[1].rstrip("%")) for row in table.rows) == pytest.approx(100, abs=0.5)
    assert {len(row) for row in table.rows} == {len(table.head)}


def test_hardly_an_operator_of_forward_and_backward_is_left_over_and_without_scopes_all_are(run):
    model = build(run, run.data.vocab_size).train()
    x = torch.randn(64, run.model.d_model)
    (bits,) = RandomBits.of_layers(random_bits(layer_keys(1, 2, "source", 1), 0, *x.shape), 1)

    def left_over() -> float:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            layer = model.encoder[0]
            layer.after_feed_forward(x, layer.feed_forward(x), bits).sum().backward()
        groups = [group for group, _ in breakdown.attributed(list(profiler.events()), False)]
        assert OPTIMISER not in groups
        return groups.count(REST) / len(groups)

    with breakdown.scopes(model):
        assert left_over() < 0.5
    assert left_over() == 1  # control, and the hooks are gone
