"""What only a GPU can show: its way through attention and the compiled stacks against the CPU's, and exact resume."""

import random
from collections.abc import Callable

import models
import pytest
import torch
from torch import Tensor
from trained_runs import equal

from aiayn.config import compose, folders
from aiayn.paper.batch import Batch
from aiayn.paper.loss import label_smoothed_cross_entropy
from aiayn.paper.transformer import Transformer
from aiayn.runs import checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # torch's compiler has much to say, and not the same in each version
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model(**changes: int) -> Transformer:
    torch.manual_seed(5)
    sizes = {**models.SIZES, "d_model": 64, "d_ff": 128, "d_k": 16, "d_v": 32, "dropout": 0.0, **changes}
    return Transformer(**sizes, positions="sinusoids", max_length=101, vocab_size=211)


def batch(sentences: int) -> Batch:
    draw = random.Random(sentences)
    sides = [[[draw.randrange(4, 211) for _ in range(draw.randint(1, 66))] for _ in range(sentences)] for _ in range(2)]
    return models.batch(*sides)


def loss_and_gradients(model: Transformer, given: Batch) -> tuple[float, Tensor]:
    model.zero_grad()
    loss, _ = label_smoothed_cross_entropy(
        model.hidden(given), model.embedding.weight, given.target, 0.1, compiled=model.is_compiled()
    )
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("changes", [{}, {"num_heads": 1, "d_k": 512, "d_v": 512}, {"d_k": 32, "d_v": 8}], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_loss_and_gradients_in_bf16_are_those_of_the_cpu(changes: dict[str, int], compiled: bool) -> None:
    given = batch(97)
    loss, gradients = loss_and_gradients(model(**changes), given)
    ours = model(**changes).cuda()
    if compiled:
        ours.compile_stacks(6400)  # no more tokens on either side
    with torch.autocast("cuda", torch.bfloat16):
        found, found_gradients = loss_and_gradients(ours, given.to("cuda"))
    assert abs(found - loss) / loss < 1e-2
    assert distance(found_gradients, gradients) < 2e-2
    # Control: another batch is further away than that
    _, other = loss_and_gradients(model(**changes), batch(89))
    assert distance(other, gradients) > 2e-2


def test_in_float32_gpu_and_cpu_agree() -> None:
    given = batch(31)
    loss, gradients = loss_and_gradients(model(), given)
    found, found_gradients = loss_and_gradients(model().cuda(), given.to("cuda"))
    assert found == pytest.approx(loss, rel=1e-4)
    assert distance(found_gradients, gradients) < 1e-3


# In bf16 torch's variable-length kernel, in float32 its kernels for padded sentences
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    precision: str, toy: list[str], aiayn: Callable[..., object]
) -> None:
    deterministic = ("hardware.deterministic=true", "training.checkpoint_every=3", "model.dropout=0.1")
    computing = ("hardware=gpu", f"hardware.precision={precision}", "hardware.tokens_per_micro_batch=40")
    words = [*toy, *computing, *deterministic]
    aiayn("train", *words)
    folder = folders.run_folder(compose.compose_row(*words))
    last, *_, middle = checkpoint.newest(folder / "checkpoints", 100)
    end = checkpoint.load(last)
    for path in (last, last.with_name(last.name + ".sha256"), folder / "result.json"):
        path.unlink()
    aiayn("train", *words)
    assert equal(end, checkpoint.load(last))
    assert not equal(checkpoint.load(middle), end)  # control
