"""`aiayn export`: a trained run as files for CTranslate2, or as plain safetensors."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.config import folders
from aiayn.config.schema import Config, ConfigError
from aiayn.core import storage
from aiayn.data.sentencepiece_bpe import BOS, EOS, UNK
from aiayn.paper.attention import MemoryAttention, SelfAttention
from aiayn.paper.layers import NORM_EPSILON, AddAndNorm, LearnedPositions, NoPositions, Sinusoids
from aiayn.paper.transformer import DecoderLayer, EncoderLayer, Transformer
from aiayn.runs.models import trained

# D d_model; H heads; K d_k; V d_v; W width of a head elsewhere; P positions

POSITIONS = 1024  # of the longest sentence that CTranslate2 and the baselines are given, EOS included
FORMATS = ("ctranslate2", "safetensors")


def projections(attention: SelfAttention | MemoryAttention, width: int) -> list[nn.Linear]:
    """Queries, keys, values and output as others have them: apart, and every head widened by zeros to `width`."""
    if isinstance(attention, SelfAttention):
        inputs = [attention.query_key_value]
    else:
        inputs = [attention.query, attention.key_value]
    heads = attention.num_heads
    # The bias as one more column: (H * (2 K + V), D + 1)
    rows = torch.cat([torch.cat([linear.weight, linear.bias.unsqueeze(1)], 1) for linear in inputs])
    parts = torch.split(rows, [heads * attention.d_k, heads * attention.d_k, heads * attention.d_v])
    widened = [_widened(part, heads, width) for part in parts]
    output = _linear(_widened(attention.output.weight.t(), heads, width).t(), attention.output.bias)
    return [*(_linear(part[:, :-1], part[:, -1]) for part in widened), output]


def positions(table: Sinusoids | LearnedPositions | NoPositions) -> Tensor:
    """The positional encodings (P, D) of one side, which has some."""
    assert not isinstance(table, NoPositions)
    weight = next(iter([*table.parameters(), *table.buffers()]))
    table.extend(POSITIONS)
    return table(torch.arange(POSITIONS, device=weight.device)).detach().float()  # type: ignore[no-any-return]


def ctranslate2_spec(model: Transformer, subwords: list[str]) -> Any:
    """The model as CTranslate2's specification, ready to be saved; every row of Table 3 can be held."""
    from ctranslate2.specs import common_spec, transformer_spec

    first = model.encoder[0].self_attention
    assert isinstance(first, SelfAttention)
    width = max(first.d_k, first.d_v)
    spec = transformer_spec.TransformerSpec.from_config(
        len(model.encoder), first.num_heads, pre_norm=False, activation=common_spec.Activation.RELU
    )

    def linear(target: Any, *ours: nn.Module) -> None:
        target.weight, target.bias = (
            torch.cat([part.get_parameter(name) for part in ours]).detach() for name in ("weight", "bias")
        )

    def norm(target: Any, ours: nn.LayerNorm) -> None:
        target.gamma, target.beta = ours.weight.detach(), ours.bias.detach()

    def attention(target: Any, ours: SelfAttention | MemoryAttention, after: AddAndNorm) -> None:
        parts = projections(ours, width)
        target.queries_scale = ours.d_k**-0.5
        inputs = [parts[:3]] if isinstance(ours, SelfAttention) else [parts[:1], parts[1:3]]
        for layer, part in zip(target.linear, [*inputs, parts[3:]], strict=True):
            linear(layer, *part)
        norm(target.layer_norm, after.norm)

    embedding = model.embedding.weight.detach()
    spec.encoder.embeddings[0].weight = embedding
    spec.decoder.embeddings.weight = spec.decoder.projection.weight = embedding
    spec.encoder.position_encodings.encodings = positions(model.source_positions)
    spec.decoder.position_encodings.encodings = positions(model.target_positions)
    targets = [*spec.encoder.layer, *spec.decoder.layer]
    for target, layer in zip(targets, [*model.encoder, *model.decoder], strict=True):
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        attention(target.self_attention, layer.self_attention, layer.after_self_attention)
        linear(target.ffn.linear_0, layer.feed_forward[0])
        linear(target.ffn.linear_1, layer.feed_forward[2])
        norm(target.ffn.layer_norm, layer.after_feed_forward.norm)
        if isinstance(layer, DecoderLayer):
            attention(target.attention, layer.memory_attention, layer.after_memory_attention)
    spec.register_source_vocabulary(subwords)
    spec.register_target_vocabulary(subwords)
    spec.config.layer_norm_epsilon = NORM_EPSILON
    spec.config.add_source_eos = True
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = subwords[UNK], subwords[BOS], subwords[EOS]
    spec.config.decoder_start_token = subwords[BOS]
    spec.validate()
    spec.optimize()
    return spec


def write(model: Transformer, subwords: list[str], format: str, folder: Path) -> None:
    """Has a library write the model into `folder`."""
    if format == "ctranslate2":
        ctranslate2_spec(model.float(), subwords).save(str(folder))  # it knows no float64
    else:
        from safetensors.torch import save_model

        save_model(model, str(folder / "model.safetensors"))


def main(config: Config) -> None:
    """Exports the run that the configuration names into its folder, with its tokenizer."""
    if config.format not in FORMATS:
        raise ConfigError(f"format: export needs format={' or format='.join(FORMATS)}")
    if config.model.kind != "transformer":
        raise ConfigError(f"model.kind={config.model.kind}: only Transformers are exported, such as experiment=base")
    if config.format != "safetensors" and not config.model.in_table3:
        raise ConfigError(
            f"format={config.format}: holds models of Table 3's parts, which those of"
            f" {folders.label(config)} are not; use format=safetensors"
        )
    fidelity = config.fidelity
    if fidelity.sinusoids != "alternating" or fidelity.target_space or fidelity.zero_start or fidelity.embedding_rows:
        raise ConfigError("fidelity: no format holds other values than the paper's; export runs of fidelity=paper")
    if find_spec(config.format) is None:  # the format is named after its library
        raise ConfigError(f"format={config.format}: {config.format} is not installed; pip install 'aiayn[export]'")
    model, dataset, run_folder, _ = trained(config)
    assert isinstance(model, Transformer)
    averaged = f"-average{config.average}" if config.average > 1 else ""
    folder = run_folder / f"export-{config.format}{averaged}"
    storage.remove_unfinished(run_folder)
    with storage.staged(folder) as staging:
        write(model.cpu(), dataset.tokenizer.subwords, config.format, staging)
    storage.write_bytes(folder / "tokenizer.model", (dataset.folder / "tokenizer.model").read_bytes())
    sizes = {**dataclasses.asdict(config.model), "max_length": config.data.max_length}
    storage.write_json(folder / "aiayn.json", {**sizes, "vocab_size": len(dataset.tokenizer.subwords)})
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def _widened(rows: Tensor, num_heads: int, width: int) -> Tensor:
    """Rows (H * K, ...) as (H * W, ...)."""
    heads = rows.view(num_heads, -1, rows.size(1))
    return F.pad(heads, (0, 0, 0, width - heads.size(1))).flatten(0, 1)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.size(1), weight.size(0), device="meta")
    linear.weight, linear.bias = (nn.Parameter(x.detach().clone()) for x in (weight, bias))
    return linear
