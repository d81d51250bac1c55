"""A GPU without a GPU: tensors on `cuda` are torch's fake ones, which have no numbers; those on the host are real.

It shows what each operator is given and where the host waits, not what a driver refuses. Run by test_fake_cuda.py as a
process of its own, with fake_cuda_guard.cpp preloaded: a question, a fault to insert or nothing, and rows of the table.
"""

import itertools
import json
import os
import sys
import traceback
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.utils._pytree as pytree
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from aiayn.config import compose
from aiayn.config.schema import Config, vary
from aiayn.cost import estimate
from aiayn.data.update_plan import rows_of_part
from aiayn.evaluation.search import decoder_of, search
from aiayn.paper import attention, beam_search, transformer
from aiayn.paper.batch import Batch, Packing
from aiayn.paper.loss import CHUNK_ELEMENTS, label_smoothed_cross_entropy
from aiayn.runs.models import build, parameters
from aiayn.training import lightning_model
from aiayn.training.lightning_data import Update

aten = torch.ops.aten


def pretend() -> None:
    """Makes torch believe, in all of this process, that it has a GPU."""
    torch.cuda.get_device_capability, torch.cuda.is_bf16_supported = lambda device=None: (9, 0), lambda *_: True
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda._lazy_init, torch.cuda.Event, Tensor.pin_memory = mock.Mock(), mock.Mock(), Tensor.clone
    torch._C._ensureCUDADeviceGuardSet()  # as FakeTensorMode does for itself where there is no GPU
    torch._C._set_only_lift_cpu_tensors(True)


def on_gpu(x: Any) -> bool:
    return isinstance(x, FakeTensor) and x.fake_device.type == "cuda"


class FakeCuda(TorchDispatchMode):
    """Notes the calls of the variable-length kernel, and what the host waits for, each with file and line."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self.kernel_calls: list[tuple[str, tuple[Any, ...]]] = []
        self.waits: Counter[str] = Counter()
        self.sentences, self.count_true = itertools.count(), lambda: 0  # of a mask whose elements nobody knows
        FakeTensor.tolist = lambda x: self.tolist(x)

    def wait(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/src/aiayn/" in frame.filename]
        self.waits[f"{what} at {frames[-1].filename.split('/src/')[1]}:{frames[-1].lineno}" if frames else what] += 1

    def tolist(self, x: Tensor) -> list[Any]:
        self.wait("tolist")
        return [next(self.sentences) for _ in x] if x.dim() == 1 else np.zeros(x.shape).tolist()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
        device = kwargs.get("device", next((x for x in args if isinstance(x, torch.device)), None))
        kind = None if device is None else torch.device(device).type
        given = any(map(on_gpu, tensors))
        if kind != "cuda" and not any(isinstance(x, FakeTensor) for x in tensors):
            return func(*args, **kwargs)
        inference, key = torch.is_inference_mode_enabled(), torch._C.DispatchKey.CompositeImplicitAutograd
        if inference and func.namespace == "aten" and func.has_kernel_for_dispatch_key(key):
            with self:  # autograd, which is off here, would have taken it apart
                return func.decompose(*args, **kwargs)
        if func is aten._local_scalar_dense.default and given:
            self.wait("item")
            return True if args[0].dtype == torch.bool else 90
        if func is aten.nonzero.default and given:
            self.wait("nonzero")
            with self.fake:
                return torch.empty(self.count_true(), args[0].dim(), dtype=torch.int64, device="cuda")
        if tensors and given == (kind == "cpu") and kind and not kwargs.get("non_blocking"):
            self.wait("copy to the host" if given else "copy from pageable memory")
        if func is aten.copy_.default and on_gpu(args[0]) != on_gpu(args[1]) and args[2:] != (True,):
            self.wait("copy_ between devices")
        indices = args[1] if "aten.index" in str(func) and isinstance(args[1], list) and on_gpu(args[0]) else ()
        if any(index is not None and (index.dtype == torch.bool or not on_gpu(index)) for index in indices):
            self.wait("index of booleans or on the host")
        real = lambda x: isinstance(x, Tensor) and not isinstance(x, FakeTensor)  # noqa: E731
        fake = lambda x: self.fake.from_tensor(x, static_shapes=True) if real(x) else x  # noqa: E731
        args, kwargs = pytree.tree_map(fake, (args, kwargs))
        with self.fake:
            result = func(*args, **kwargs)
        if "varlen" in str(func):
            self.kernel_calls.append((str(func), args))
        return result


def model_of(row: Config) -> Any:
    with torch.device("cuda"):
        return build(row, row.data.vocab_size).train()


def batch(sentences: int, length: int, lengths: int = 7) -> Batch:
    """Of so many different lengths."""
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), (length - torch.arange(sentences) % lengths).cumsum(0)))
    ids = torch.full((int(offsets[-1]),), 5)
    return Batch(ids, ids.clone(), ids.clone(), offsets, offsets.clone())


def updates(row: Config, fault: str) -> dict[str, Any]:
    """Where the host waits in each of two updates, and the calls of the kernel, each checked against what it takes."""
    encode, waits = transformer.Transformer.encode, []
    lightning_model.to_host = lambda x: (torch.zeros(x.shape, dtype=x.dtype), lambda: None)
    if fault:
        transformer.Transformer.encode = lambda *given: encode(*given) * given[1].sum().item()
        attention.F.pad = lambda x, *_: x
    with FakeCuda() as mode:
        module = lightning_model.LightningTransformer(model_of(row), row.training, 1)
        module._device = torch.device("cuda", 0)
        adam = LightningOptimizer(module.configure_optimizers())
        adam._strategy = SimpleNamespace(optimizer_step=lambda adam, closure, **_: adam.step(closure))
        module.optimizers = lambda: adam
        for number in range(2):
            mode.waits.clear()
            update = Update(number, 100, 100, [batch(20, 25), batch(15, 17)]).to(module._device)
            with torch.autocast("cuda", torch.bfloat16):
                module.training_step(update, number)
            waits.append(dict(mode.waits))
    for name, args in mode.kernel_calls:
        q, k, v, *others = args[1:5] if "backward" in name else args[:3]
        for x in (q, k, v, *others):
            aligned = x.storage_offset() % 8 == x.stride(0) % 8 == x.stride(1) % 8 == 0
            assert all((on_gpu(x), x.dtype == torch.bfloat16, x.dim() == 3, x.stride(2) == 1, aligned)), x.stride()
        assert all((q.shape[1:] == k.shape[1:], k.shape == v.shape, q.size(2) in range(8, 257, 8))), q.shape
        offsets = [x for x in args if isinstance(x, Tensor) and x.dtype == torch.int32 and x.dim() == 1]
        assert all((len(offsets) == 2, len(offsets[0]) == len(offsets[1]), *map(on_gpu, offsets)))
    return {"waits": waits, "kernel": Counter("backward" in name for name, _ in mode.kernel_calls)}


def searched(row: Config, fault: str) -> list[int]:
    """The times that the host waits in each step of a search; in the last one all sentences are decided."""
    found, decided = [], beam_search.Beam.is_decided

    def counted(beam: beam_search.Beam) -> Tensor:
        found.append(mode.waits.total())
        if fault:
            beam.alive.sum().item()
        return decided(beam)

    with mock.patch.object(beam_search.Beam, "is_decided", counted), FakeCuda() as mode:
        mode.count_true = lambda: 20 if len(found) == 40 else 0
        search(decoder_of(model_of(row)), [np.arange(4, 34)] * 20, row.decoding, row.hardware)
    return np.diff(found).tolist()


def graphs(row: Config, fault: str) -> list[int]:
    """How many there are after each of three batches with sentences of other numbers and lengths."""
    made, counts, given = [], [], []
    rows = rows_of_part(row.training.tokens_per_update, row.hardware.tokens_per_micro_batch, 1)
    with FakeCuda() as mode:
        model = model_of(row)
        model.compile_stacks(rows, backend=lambda graph, inputs: made.append(graph) or graph.forward)
        compiled = model.compiled_stacks
        model.compiled_stacks = lambda *inputs: given.append(inputs) or inputs[1].new_zeros(rows, row.model.d_model)
        for sentences, length in ((80, 25), (60, 17), (90, 9)):
            model.hidden(batch(sentences, length).to("cuda"), (1, 3))
            for packing in (x for x in given[-1] if isinstance(x, Packing)):
                assert None not in map(type, (packing.padded_index, packing.mask, packing.causal_mask))  # made here
    for inputs in given:
        for packing in (x for x in inputs if isinstance(x, Packing)):
            real = torch.zeros(len(packing.kernel_offsets), dtype=torch.int32)
            packing.__dict__["kernel_offsets"] = mode.fake.from_tensor(real, static_shapes=bool(fault)).to("cuda")
        with mode.fake, torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            compiled(*inputs)
        counts.append(len(made))
    return counts


def memory(row: Config, fault: str) -> list[tuple[float, float]]:
    """GB, by length, of state and what a micro-batch keeps for its backward pass, uncompiled, and what plan says."""
    tokens, vocab_size, found = row.hardware.tokens_per_micro_batch, row.data.vocab_size, []
    count, planned = parameters(row, vocab_size), vary(row, model={"num_layers": 4}) if fault else row
    for length in (25, 100, 250):
        kept: dict[int, Any] = {}

        def keep(x: Tensor, kept: dict[int, Any] = kept) -> Tensor:
            if on_gpu(x) and not isinstance(x, torch.nn.Parameter):
                kept[x.untyped_storage()._cdata] = x.untyped_storage()
            return x

        with FakeCuda(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model, given = model_of(row), batch(tokens // length, length, 1).to("cuda")
            # No weight in bf16 but what the backward pass needs
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                hidden, weight = model.hidden(given, (1, 3)), model.embedding.weight
                loss, _ = label_smoothed_cross_entropy(hidden, weight, given.target, 0.1)
        needed = sum(storage.nbytes() for storage in kept.values()) + estimate.STATE_BYTES * count
        # Logits in bf16, then in float32, and their logarithms
        needed += CHUNK_ELEMENTS["cuda"] * 10 + estimate.CONTEXT_BYTES
        corpus = estimate.CorpusStatistics(length, length)
        found.append((needed / 1e9, estimate.memory(planned, count, vocab_size, corpus) / 1e9))
        del loss
    return found


if __name__ == "__main__":
    del os.environ["LD_PRELOAD"]
    pretend()
    question, fault, words, *names = sys.argv[1:]
    rows = {name: compose.compose_row("hardware=gpu", f"experiment={name}", *words.split()) for name in names}
    print(json.dumps({name: globals()[question](row, fault) for name, row in rows.items()}), flush=True)
    os._exit(0)  # autograd's thread of the fake GPU does not survive the interpreter's end
