"""Edits of the source, each with the test that must notice it: `python tests/mutants.py [part of a name ...]`.

A mutant that survives is a property which no test holds. Nothing is edited but a temporary copy of the checkout.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("src", "conf", "experiments", "sweeps", "tests", ".ci", "pyproject.toml", "constraints.txt")
COPIED += ("Makefile", "README.md", "LICENSE")
LONGEST_SECONDS = 300
PASSED, FAILED = 0, 1  # pytest's exit codes; all others mean that no test ran


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands once in `file`, becomes `new`; `test`, not a slow one, must fail then."""

    file: str
    old: str
    new: str
    test: str


MUTANTS = {
    "attention scores are not divided by sqrt(d_k)": Mutant(
        "src/aiayn/paper/attention.py",
        " * queries.size(-1) ** -0.5",
        "",
        "tests/paper/test_attention.py::test_eq_1_by_hand",
    ),
    "the kernel's scores are divided by the root of the padded width": Mutant(
        "src/aiayn/paper/attention.py",
        "scale=d_k**-0.5",
        "scale=width**-0.5",
        "tests/paper/test_attention.py::test_the_kernel_is_given_what_makes_it_equal_padding",
    ),
    "a position sees the next one": Mutant(
        "src/aiayn/paper/attention.py",
        "None if causal else mask, is_causal=causal",
        "None if causal else mask",
        "tests/paper/test_attention.py::test_self_attention_equals_its_definition",
    ),
    "padding is attended to": Mutant(
        "src/aiayn/paper/batch.py",
        "to_device(is_token, self.device)",
        "to_device(is_token | True, self.device)",
        "tests/paper/test_attention.py::test_self_attention_equals_its_definition",
    ),
    "label smoothing spreads over V tokens, the target among them": Mutant(
        "src/aiayn/paper/loss.py",
        "label_smoothing / (len(embedding) - 1)",
        "label_smoothing / len(embedding)",
        "tests/paper/test_loss.py::test_loss_nats_and_gradient_by_hand",
    ),
    "the smoothed loss expects the target twice": Mutant(
        "src/aiayn/paper/loss.py",
        "extra = 1 - label_smoothing - share",
        "extra = 1 - label_smoothing",
        "tests/paper/test_loss.py::test_loss_nats_and_gradient_by_hand",
    ),
    "the perplexity is that of the smoothed loss": Mutant(
        "src/aiayn/paper/loss.py",
        "torch.float32)), nats_of_target",
        "torch.float32)), loss",
        "tests/paper/test_loss.py::test_loss_nats_and_gradient_by_hand",
    ),
    "the gradient forgets the smoothing": Mutant(
        "src/aiayn/paper/loss.py",
        ".sub_(share)",
        ".sub_(0)",
        "tests/paper/test_loss.py::test_loss_nats_and_gradient_by_hand",
    ),
    "Adam's beta2 is torch's": Mutant(
        "conf/config.yaml",
        "adam_beta2: 0.98",
        "adam_beta2: 0.999",
        "tests/config/test_compose.py::test_the_base_row_has_the_papers_values",
    ),
    "the learning rate falls from the start": Mutant(
        "src/aiayn/paper/schedule.py",
        "min(step**-0.5, step * warmup_steps**-1.5)",
        "step**-0.5",
        "tests/paper/test_schedule.py::test_eq_3_by_hand",
    ),
    "the norm stands before the residual sum": Mutant(
        "src/aiayn/paper/layers.py",
        "self.norm(x + dropped if self.residual else dropped)",
        "x + self.norm(dropped)",
        "tests/paper/test_transformer.py::test_it_is_torch_s_transformer_with_dropout_in_two_places",
    ),
    "dropout falls on the residual sum": Mutant(
        "src/aiayn/paper/layers.py",
        "self.dropout(sublayer_of_x, randomness)\n        return self.norm(x + dropped if",
        "self.dropout(x + sublayer_of_x, randomness)\n        return self.norm(dropped if",
        "tests/paper/test_transformer.py::test_it_is_torch_s_transformer_with_dropout_in_two_places",
    ),
    "embeddings are not multiplied by sqrt(d_model)": Mutant(
        "src/aiayn/paper/transformer.py",
        "self.embedding(tokens) * self.d_model**0.5",
        "self.embedding(tokens)",
        "tests/paper/test_transformer.py::test_it_is_torch_s_transformer_with_dropout_in_two_places",
    ),
    "the decoder sees the token that it is to predict": Mutant(
        "src/aiayn/data/update_plan.py",
        "target_input[1:] = target[:-1]",
        "target_input[:] = target",
        "tests/data/test_update_plan.py::test_the_decoder_input_is_the_target_offset_by_one",
    ),
    "the length penalty counts from 6": Mutant(
        "src/aiayn/paper/beam_search.py",
        "return ((5 + length) / 6) ** length_penalty",
        "return ((6 + length) / 6) ** length_penalty",
        "tests/paper/test_beam_search.py::test_the_score_is_the_penalised_log_probability",
    ),
    "a beam stops at its first finished hypothesis": Mutant(
        "src/aiayn/paper/beam_search.py",
        "return log_probability / longest_penalty",
        "return log_probability - torch.inf",
        "tests/paper/test_beam_search.py::test_the_search_equals_a_slow_one",
    ),
    "BLEU leaves German compounds whole": Mutant(
        "src/aiayn/evaluation/metrics.py",
        'tokens) if language == "de"',
        "tokens) if False",
        "tests/evaluation/test_metrics.py::test_paper_tokens_are_moses_tokens_with_compounds_split",
    ),
    "each rank divides by its own tokens": Mutant(
        "src/aiayn/training/lightning_model.py",
        "(loss / update.target_tokens).backward()",
        "(loss / len(batch.target)).backward()",
        "tests/training/test_lightning_model.py::test_1_against_500_target_tokens_weigh_1_and_500",
    ),
    "a resumed run repeats its last update": Mutant(
        "src/aiayn/training/lightning_model.py",
        'self.updates_done = checkpoint["updates_done"]',
        'self.updates_done = checkpoint["updates_done"] - 1',
        "tests/training/test_lightning_model.py::test_a_restored_run_goes_on_bit_for_bit",
    ),
    "a resumed run forgets Adam's moments": Mutant(
        "src/aiayn/training/lightning_model.py",
        'self.restored = checkpoint["optimizer_states"]',
        "self.restored = []",
        "tests/training/test_lightning_model.py::test_a_restored_run_goes_on_bit_for_bit",
    ),
    "a checkpoint with any hash is intact": Mutant(
        "src/aiayn/runs/checkpoint.py",
        'return there and hash_file.read_text("utf-8-sig", "replace").split()[:1] == [storage.sha256(path)]',
        "return there",
        "tests/runs/test_checkpoint.py::test_a_damaged_newest_is_named_and_the_one_before_is_used",
    ),
    "the mean of checkpoints is their sum": Mutant(
        "src/aiayn/runs/checkpoint.py",
        "total.pop(name) / len(paths)",
        "total.pop(name)",
        "tests/evaluation/test_evaluate.py::test_averaging_is_the_mean_of_the_weights",
    ),
    "the plan drops the last sentence of an epoch": Mutant(
        "src/aiayn/data/update_plan.py",
        'order = pool[np.argsort(key, kind="stable")]\n',
        'order = pool[np.argsort(key, kind="stable")[:-1]]\n',
        "tests/data/test_update_plan.py::test_an_epoch_has_every_sentence_once_within_the_budget",
    ),
    "every result is up to date": Mutant(
        "src/aiayn/runs/records.py",
        "if value != claim]",
        "if False]",
        "tests/tables/test_table3.py::test_a_run_of_other_values_than_its_row_is_stale",
    ),
    "initial weights ignore the seed": Mutant(
        "src/aiayn/runs/models.py",
        "    torch.manual_seed(config.seed)",
        "    torch.manual_seed(1)",
        "tests/training/test_train.py::test_the_seed_decides_weights_order_and_dropout",
    ),
    "the order of sentences ignores the seed": Mutant(
        "src/aiayn/training/train.py",
        "**sizes, seed=run.seed, start=record.start",
        "**sizes, seed=1, start=record.start",
        "tests/training/test_train.py::test_the_seed_decides_weights_order_and_dropout",
    ),
    "dropout ignores the seed": Mutant(
        "src/aiayn/paper/dropout.py",
        'f"{seed} {update} {side}"',
        'f"{update} {side}"',
        "tests/training/test_train.py::test_the_seed_decides_weights_order_and_dropout",
    ),
    "bf16-mixed trains in float32": Mutant(
        "src/aiayn/training/train.py",
        "        precision=run.hardware.precision,  # type: ignore[arg-type]\n",
        "",
        "tests/training/test_train.py::test_products_are_computed_in_the_precision_asked_for",
    ),
    "hardware.threads is ignored": Mutant(
        "src/aiayn/training/train.py",
        "    compute_with(run.hardware.threads)",
        "    compute_with(1)",
        "tests/training/test_train.py::test_a_run_has_as_many_threads_as_it_asks_for",
    ),
    "a non-finite loss is not in found_inf": Mutant(
        "src/aiayn/training/lightning_model.py",
        "(norm + sums[:2].sum())",
        "norm",
        "tests/training/test_lightning_model.py::test_nothing_moves_when_anything_is_not_finite",
    ),
    "decoding.max_extra is fixed at 50": Mutant(
        "src/aiayn/paper/beam_search.py",
        "source_offsets.diff() + max_extra",
        "source_offsets.diff() + 50",
        "tests/evaluation/test_evaluate.py::test_a_translation_may_be_longer_by_max_extra",
    ),
    "a step is taken with this rank's gradient alone": Mutant(
        "src/aiayn/training/gradient_sum.py",
        "all_reduce(flat)",
        "all_reduce(flat.clone())",
        "tests/training/test_gradient_sum.py::test_gradients_become_their_sums_over_the_ranks",
    ),
    "a p-value is one-sided": Mutant(
        "src/aiayn/tables/paper_claims.py",
        "known = [min(1.0, 2 * min(pair)) for",
        "known = [min(1.0, min(pair)) for",
        "tests/tables/test_paper_claims.py::test_a_p_value_is_two_sided",
    ),
    "the interval of an equality is that of 95 %": Mutant(
        "src/aiayn/tables/paper_claims.py",
        "ERROR_RATE / (1 if claim.equal else 2)",
        "ERROR_RATE / 2",
        "tests/tables/test_paper_claims.py::test_interval_over_sentences_is_95_and_for_equality_90",
    ),
    "staleness ignores decoding": Mutant(
        "src/aiayn/runs/records.py",
        '"scale.", "decoding.")',
        '"scale.")',
        "tests/tables/test_table3.py::test_a_run_of_other_values_than_its_row_is_stale",
    ),
    "a table mixes runs of several texts": Mutant(
        "src/aiayn/tables/table3.py",
        "claims = {**_claims(trained[name]), **shared}",
        "claims = _claims(trained[name])",
        "tests/tables/test_table3.py::test_rows_are_compared_on_one_text_only",
    ),
    "relative positions count from the key": Mutant(
        "src/aiayn/alternatives/scores.py",
        "index = distance.clamp",
        "index = (-distance).clamp",
        "tests/alternatives/test_scores.py::test_values_and_gradients_are_those_of_the_naive_gather",
    ),
    "additive scores are linear": Mutant(
        "src/aiayn/alternatives/scores.py",
        "(queries.unsqueeze(-2) + keys.unsqueeze(-3)).tanh()",
        "queries.unsqueeze(-2) + keys.unsqueeze(-3)",
        "tests/alternatives/test_scores.py::test_additive_scores_have_a_vector_for_each_head",
    ),
}


def main(chosen: Sequence[str]) -> int:
    """Prints what became of each mutant; 1 if any survives. RuntimeError where a test fails without one."""
    table = {name: mutant for name, mutant in MUTANTS.items() if not chosen or any(word in name for word in chosen)}
    fates = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_checkout(Path(folder))
        run_tests(Path(folder), sorted({mutant.test for mutant in table.values()}), {PASSED})
        for name, mutant in table.items():
            path = Path(folder) / mutant.file
            original = path.read_text()
            path.write_text(mutated(mutant, original))
            survives = run_tests(Path(folder), [mutant.test], {PASSED, FAILED}) == PASSED
            path.write_text(original)
            fates.append("survived" if survives else "killed")
            print(f"{fates[-1]:9} {name}  ({mutant.test})", flush=True)
    print(f"{fates.count('killed')} of {len(fates)} killed")
    return int(set(fates) != {"killed"})


def mutated(mutant: Mutant, text: str) -> str:
    """The text with the edit. Raises ValueError where `old` does not stand in it exactly once, or it is no Python."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times, not once")
    edited = text.replace(mutant.old, mutant.new)
    if mutant.file.endswith(".py"):
        compile(edited, mutant.file, "exec")
    return edited


def copy_checkout(to: Path) -> None:
    """Puts a copy of the source and the tests into an empty folder, so laid out that `src` alone is the package."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, to / name)
    packages = tomllib.loads((to / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    for package, folder in packages.items():
        inside = to / "src" / Path(*package.split("."))
        if not inside.exists():  # what an editable installation maps from elsewhere: it would be the original's
            inside.symlink_to(to / folder)


def run_tests(checkout: Path, tests: Sequence[str], expected: set[int]) -> int:
    """Pytest's exit code, with the checkout's own package and without slow tests; RuntimeError for another code."""
    # No bytecode: it is chosen by size and second, which an edit may leave as they were
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
    )
    if done.returncode not in expected:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
