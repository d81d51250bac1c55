"""What training computes, in floating-point operations, and what one device computes in a second."""

from dataclasses import dataclass

from aiayn.config.schema import MAX_DISTANCE, Config, Hardware, Model, Training
from aiayn.data.dataset import Pairs

# The token-weighted mean length of WMT14's sentences, 28 subwords each on average: what counts in attention
LENGTH = 40.0
TERA = 1e12


@dataclass(frozen=True)
class Device:
    """A GPU, or a core of a CPU: peak in TFLOP/s, memory in GB; of a GPU, what share training sustains."""

    peak: float
    memory: float | None
    efficiency: float = 0.18
    basis: str = "as base on an H100, assumed of other rows and GPUs"  # where the efficiency comes from


# Dense bf16 products summed in fp32, and memory, as the makers' data sheets have them
GPUS = {
    "a100": Device(312.0, 80.0),
    "h100": Device(989.4, 80.0),
    "h200": Device(989.4, 141.0),
    "b200": Device(2250.0, 180.0),
    "l40s": Device(362.0, 48.0),
    "rtx4090": Device(165.2, 24.0),
    "rtx4080": Device(97.5, 16.0),
    "rtx4060": Device(30.2, 8.0),
}
VOCAB_SIZES = {"en-de": 37_000, "en-fr": 32_000}  # 5.1: of byte pairs "about 37000", of word pieces 32000
# fp32 on one core with AVX-512 at 2.6 GHz: two units of 16 lanes, each multiplies and adds
CORE = Device(0.166, None, basis="measured now in updates of base")


def training_flops(
    model: Model, embedding_rows: int, source_tokens: float, target_tokens: float, source_length: float, length: float
) -> float:
    """Forward and backward, nothing computed twice: a multiplication and an addition are 2, softmax included.

    The two lengths are the token-weighted mean lengths of source and target sentences. Of masked self-attention only
    the half that is not masked counts; norms, dropout, biases and the optimiser do not.
    """
    d = model.d_model
    products = _of_transformer if model.kind == "transformer" else _of_recurrent
    source, target = products(model, source_length, length)
    layers = source * source_tokens + target * target_tokens
    return 6.0 * (layers + embedding_rows * d * target_tokens)


def planned(
    model: Model, training: Training, embedding_rows: int, source_length: float = LENGTH, length: float = LENGTH
) -> float:
    """The operations of all updates of a training, every update full, its sentences by default as long as WMT14's."""
    tokens = training.max_steps * training.tokens_per_update
    return training_flops(model, embedding_rows, tokens, tokens, source_length, length)


def of_paper(row: Config, pair: str = "en-de") -> float:
    """FLOPs of the paper's training of an unscaled row: its updates of full size, its subwords, assumed lengths."""
    return planned(row.model, row.training, VOCAB_SIZES[pair])


def _of_transformer(model: Model, source_length: float, length: float) -> tuple[float, float]:
    """Multiplications with additions of the forward pass through all layers for a source token and a target token."""
    d, h = model.d_model, model.num_heads
    keys_and_values = h * (model.d_k + model.d_v)
    # The scores and the sum of values for each pair of tokens; additive ones add and multiply
    pair = h * (model.d_k * (2 if model.scores == "additive" else 1) + model.d_v)
    relative = h * model.d_k * (2 * MAX_DISTANCE + 1) if model.positions == "relative" else 0
    # As many products a token as weights: all of self-attention's, and half of those of attention to the encoder, whose
    # keys and values belong to the source, and queries and output to the target
    shared = d * (3 * keys_and_values + 2 * model.d_ff) + pair * source_length + relative
    return model.num_layers * shared, model.num_layers * (shared + pair * length / 2)


def _of_recurrent(model: Model, source_length: float, length: float) -> tuple[float, float]:
    """The same of LSTMs: four gates, each of the input and of the state before, whose width is half in the encoder."""
    d = model.d_model
    attention = 2 * d * d + 2 * d * source_length if model.kind == "rnn_attention" else 0
    return model.num_layers * 6 * d * d, model.num_layers * 8 * d * d + attention


def weighted_lengths(pairs: Pairs) -> tuple[float, float]:
    """The mean length of the sentence that a source token, and a target token, stands in: what counts in attention."""
    of_source, of_target = pairs.source_lengths, pairs.target_lengths
    return float((of_source**2).sum() / of_source.sum()), float((of_target**2).sum() / of_target.sum())


def device(hardware: Hardware, gpu: str) -> Device:
    """What a run computes on: the GPU of that name, or a core."""
    return GPUS[gpu] if hardware.accelerator == "gpu" else CORE


def power(flops: float, digits: int = 2) -> str:
    """Operations as Table 2 has them: with one digit 3.3e18."""
    return f"{flops:.{digits}e}".replace("e+", "e")
