"""Table 1's layers: each is what its name says, and its counts, steps and paths are those of brute force."""

import json
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from aiayn.bench import bench, layer_types
from aiayn.config import compose
from aiayn.config.schema import Bench, ConfigError

D, R, K = 64, 7, 3
KINDS = layer_types.layer_types(
    Bench("layers", 5.0, 1, 1, 0.0, d_model=D, neighbourhood=R, kernel_width=K, max_length=64, sequences=2, output="")
)
ATTENTION, RECURRENT, CONTIGUOUS, DILATED, RESTRICTED = KINDS


def banded(attention: layer_types.Attention, radius: int) -> layer_types.Attention:
    """Full attention under a mask that leaves every query `radius` keys on each side."""

    class Banded(layer_types.Attention):
        def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            places = torch.arange(queries.size(2))
            mask = (places[:, None] - places).abs() <= radius
            return nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

    found = Banded(2 * D)
    found.load_state_dict(attention.state_dict())
    return found


@pytest.mark.parametrize("length", [1, 2, 3, 17, 24])
def test_attention_in_blocks_equals_full_attention_with_a_band_mask(length) -> None:
    blocks = layer_types.NeighbourhoodAttention(2 * D, R)
    x = torch.randn(5, length, 2 * D, requires_grad=True)
    probe = torch.randn(5, length, 2 * D)
    full, wider = banded(blocks, R // 2), banded(blocks, R // 2 + 1)
    found, expected, control = (
        (out := layer(x), *torch.autograd.grad(out, x, probe)) for layer in (blocks, full, wider)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.allclose(found[0], control[0], atol=1e-5) == (length <= R // 2 + 1)


def test_attention_is_torchs_own() -> None:
    ours, theirs = layer_types.Attention(2 * D), nn.MultiheadAttention(2 * D, 2, batch_first=True)
    theirs.in_proj_weight.data = ours.query_key_value.weight.data
    theirs.in_proj_bias.data = ours.query_key_value.bias.data
    theirs.out_proj.load_state_dict(ours.output.state_dict())
    x = torch.randn(3, 11, 2 * D)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0])


@pytest.mark.parametrize("dilation", [1, 5])
def test_a_convolution_sums_over_its_own_token_and_those_before_it(dilation) -> None:
    layer = layer_types.Convolution(7, K, dilation)
    x = torch.randn(2, 13, 7)
    weight, bias = layer.convolution.weight, layer.convolution.bias
    for place in range(13):
        seen = [(tap, place - (K - 1 - tap) * dilation) for tap in range(K)]
        expected = bias + sum(x[:, at] @ weight[:, :, tap].T for tap, at in seen if at >= 0)
        torch.testing.assert_close(layer(x)[:, place], expected)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_so_many_steps_make_the_outputs_and_no_fewer_do(kind) -> None:
    layer, length = kind.build(5, 1), 11
    x = torch.randn(2, length, 5)
    made = [torch.zeros(2, length, 5 * layer.vectors)]
    for _ in range(layer.steps(length)):
        made.append(layer.step(x, made[-1]))
    torch.testing.assert_close(made[-1][..., :5], layer(x))
    assert not torch.allclose(made[-2][..., :5], layer(x))
    assert layer.steps(length) == (length if kind is RECURRENT else 1)


def connected(kind: layer_types.LayerType, length: int, steps: int) -> Tensor:
    """Which outputs (N,) depend on which inputs (N,) through so many steps: layers, or of a recurrent layer tokens."""
    x = torch.randn(1, length, 2, requires_grad=True)
    if kind is RECURRENT:
        layer = kind.build(2, 0)
        found = torch.zeros(1, length, 2 * layer.vectors)
        for _ in range(steps):
            found = layer.step(x, found)
    else:
        found = x
        for below in range(steps):
            found = kind.build(2, below)(found)
    rows = [torch.autograd.grad(found[0, place].sum(), x, retain_graph=True)[0][0] for place in range(length)]
    return torch.stack(rows).ne(0).any(-1)


@pytest.mark.parametrize("length", [2, 3, 9, 10, 19])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_path_is_as_long_as_the_shallowest_stack_that_connects_what_can_be_connected(kind, length) -> None:
    everything = torch.ones(length, length, dtype=torch.bool)
    if kind in (RECURRENT, CONTIGUOUS, DILATED):
        everything = everything.tril()
    found = layer_types.path_length(kind, length)
    assert torch.equal(connected(kind, length, found), everything)
    assert found == 1 or not torch.equal(connected(kind, length, found - 1), everything)
    assert (
        found
        == {
            ATTENTION.name: 1,
            RECURRENT.name: length,
            CONTIGUOUS.name: math.ceil((length - 1) / (K - 1)),
            DILATED.name: next(power for power in range(length) if K**power >= length),
            RESTRICTED.name: math.ceil((length - 1) / (R // 2)),
        }[kind.name]
    )


@pytest.mark.parametrize("length", [5, 24, 41])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_operations_are_those_that_torch_counts(kind, length) -> None:
    # In 64 bits torch computes an LSTM product by product; so it does attention when asked
    layer = kind.build(D, 1).double()
    x = torch.randn(3, length, D, dtype=torch.float64, requires_grad=True)
    # A recurrent layer begins with states like those between its tokens, which have gradients
    states = torch.zeros(2, 1, 3, D, dtype=torch.float64, requires_grad=True).unbind()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        outputs = layer.lstm(x, states)[0] if kind is RECURRENT else layer(x)
        outputs.sum().backward()
    assert counter.get_total_flops() == 3 * kind.flops(length)
    assert counter.get_total_flops() != 3 * kind.flops(length + 1)  # control


def test_the_exponent_is_that_of_the_longer_half() -> None:
    lengths = layer_types.lengths_to(1024)
    assert lengths == [16, 32, 64, 128, 256, 512, 1024]
    assert layer_types.lengths_to(1023) == lengths[:-1]
    for power in (1.0, 1.5, 2.0):
        times = [7.0 * length**power for length in lengths]
        assert layer_types.exponent(lengths, times) == pytest.approx(power)
        assert layer_types.exponent(lengths, [1e9, *times[1:]]) == pytest.approx(power)
        assert layer_types.exponent(lengths, [*times[:-1], 1e9]) != pytest.approx(power)  # control


def test_lines_cross_where_their_powers_do_and_nowhere_if_one_is_always_above() -> None:
    lengths = [16, 32, 64, 128]
    assert layer_types.crossing(lengths, [n**2 for n in lengths], [50 * n for n in lengths]) == pytest.approx(50)
    assert layer_types.crossing(lengths, [n**2 for n in lengths], [500 * n for n in lengths]) is None
    assert layer_types.crossing(lengths, [n**2 for n in lengths], lengths) is None
    # Dearer at one length in between, and cheaper again at the longest
    assert layer_types.crossing([16, 32, 64, 128, 256], [1, 1, 1, 9, 1], [2] * 5) is None


def test_everything_is_measured_and_self_attention_computes_more_from_2_d_on(
    toy, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(bench, "apart", lambda measure, *given: measure(*given))
    sizes = ["bench.kind=layers", "bench.max_length=64", f"bench.d_model={D}", f"bench.neighbourhood={R}"]
    bench.main(compose.compose_row(*toy, *sizes, "bench.rounds=3", f"bench.output={tmp_path}/all.json"))
    part = json.loads((tmp_path / "all.json").read_text())["parts"]["layers"]
    assert part["lengths"] == [16, 32, 64]
    assert [line["name"] for line in part["layers"]] == [kind.name for kind in KINDS]
    for line, kind in zip(part["layers"], KINDS, strict=True):
        assert [len(rounds) for rounds in line["seconds_a_round"]] == [3, 3, 3]
        assert line["seconds_a_token"] == [sorted(rounds)[1] / 64 for rounds in line["seconds_a_round"]]
        assert line["flops"] == [kind.flops(length) for length in (16, 32, 64)]
        assert line["path_length"] == layer_types.path_length(kind, 64)
    assert part["crossings"]["counted"] == pytest.approx(2 * D, abs=1)
    assert part["crossings"]["by_orders"] == pytest.approx(D, abs=1)
    printed = capsys.readouterr().out
    for words in ("Table 1 measured", *(kind.name for kind in KINDS), f"from n = {2 * D} on (2 d)"):
        assert words in printed
        assert words in (tmp_path / "all.md").read_text()


def test_layers_take_turns_at_every_length(toy, monkeypatch) -> None:
    turns = []

    def note(contestants, rounds, device) -> None:
        turns.append([contestant.name for contestant in contestants])
        for contestant in contestants:
            contestant.seconds_a_round += [1.0] * rounds

    monkeypatch.setattr(layer_types, "take_turns", note)
    layer_types.layers(compose.compose_row(*toy, "bench.max_length=64", f"bench.d_model={D}"))
    assert turns == [[kind.name for kind in KINDS]] * 3


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("bench.neighbourhood=64", r"^bench\.neighbourhood=64: must be odd.*$"),
        ("bench.d_model=100", r"^bench\.d_model=100: must be a multiple of 64.*$"),
        ("bench.kernel_width=1", r"^bench\.kernel_width=1: must be at least 2.*$"),
        ("bench.max_length=63", r"^bench\.max_length=63: must be at least 64.*$"),
        ("bench.sequences=0", r"^bench\.sequences=0: must be at least 1.*$"),
        ("bench.kind=layer", r"^bench\.kind='layer': must be one of .*layers$"),
    ],
)
def test_a_size_that_does_not_suit_is_refused_in_one_line(word, said) -> None:
    with pytest.raises(ConfigError, match=said):
        compose.compose_row(word)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_layers_compute_in_bf16(toy) -> None:
    run = compose.compose_row(*toy, "hardware=gpu", "hardware.tokens_per_micro_batch=40", "bench.max_length=64")
    assert layer_types.layers(run)["precision"] == "bf16"
