"""Packed sentences: padding and its inverse, positions and masks; a batch on its way to a device."""

from itertools import pairwise

import pytest
import torch
from attention_inputs import LENGTHS, offsets
from models import batch

from aiayn.paper.batch import Packing


@pytest.mark.parametrize("shape", [(), (5,), (3, 7)], ids=str)
def test_padding_adds_zeros_and_unpadding_undoes_it(shape: tuple[int, ...]) -> None:
    packing, x = Packing(offsets(LENGTHS), 17), 1 + torch.rand(17, *shape)
    padded = packing.pad(x)
    assert padded.shape == (len(LENGTHS), 16, *shape)
    for number, (begin, end) in enumerate(pairwise(offsets(LENGTHS).tolist())):
        assert torch.equal(padded[number, : end - begin], x[begin:end])
        assert not padded[number, end - begin :].any()
    unpadded = packing.unpad(padded.masked_fill(padded == 0, torch.nan))
    assert torch.equal(unpadded[:13], x[:13])
    assert unpadded.shape == x.shape
    assert not unpadded[13:].any()


def test_positions_and_mask_follow_the_sentences() -> None:
    packing = Packing(offsets((2, 3)))
    assert packing.positions.tolist() == [0, 1, 0, 1, 2]
    assert packing.mask is not None
    assert packing.mask.shape == (2, 1, 1, 16)
    assert packing.mask.sum(3).tolist() == [[[2]], [[3]]]
    assert packing.mask[..., :2].all()
    assert Packing(offsets((17, 17))).mask is None
    assert Packing(offsets((2, 3)), 7).positions.tolist() == [0, 1, 0, 1, 2, 0, 0]


def test_a_batch_on_a_device_keeps_its_offsets_on_the_host() -> None:
    moved = batch().to("meta")
    assert {moved.source.device.type, moved.target.device.type, moved.target_input.device.type} == {"meta"}
    assert {moved.source_offsets.device.type, moved.target_offsets.device.type} == {"cpu"}
