"""Packed sentences: padding and its inverse, positions and masks; a batch on its way to a device."""

from itertools import pairwise

import torch
from models import batch

from aiayn.paper.batch import Packing


def test_padding_adds_zeros_and_unpadding_undoes_it() -> None:
    offsets = [0, 4, 5, 11, 13]
    packing, x = Packing(torch.tensor(offsets), 17), 1 + torch.rand(17, 3)
    padded = packing.pad(x)
    assert padded.shape == (4, 16, 3)
    for number, (begin, end) in enumerate(pairwise(offsets)):
        assert torch.equal(padded[number, : end - begin], x[begin:end])
        assert not padded[number, end - begin :].any()
    unpadded = packing.unpad(padded.masked_fill(padded == 0, torch.nan))
    assert torch.equal(unpadded[:13], x[:13])
    assert unpadded.shape == x.shape
    assert not unpadded[13:].any()


def test_positions_and_mask_follow_the_sentences() -> None:
    packing = Packing(torch.tensor([0, 2, 5]))
    assert packing.positions.tolist() == [0, 1, 0, 1, 2]
    assert packing.mask is not None
    assert packing.mask.sum(3).tolist() == [[[2]], [[3]]]
    assert packing.mask[..., :2].all()
    assert Packing(torch.tensor([0, 17, 34])).mask is None
    assert Packing(torch.tensor([0, 2, 5]), 7).positions.tolist() == [0, 1, 0, 1, 2, 0, 0]


def test_a_batch_on_a_device_keeps_its_offsets_on_the_host() -> None:
    moved = batch().to("meta")
    assert {moved.source.device.type, moved.target.device.type, moved.target_input.device.type} == {"meta"}
    assert {moved.source_offsets.device.type, moved.target_offsets.device.type} == {"cpu"}
