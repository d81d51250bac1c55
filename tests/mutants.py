"""Edits of the source, each with the test that must notice it: `python tests/mutants.py [part of a name ...]`.

A mutant that survives is a property which no test holds. Nothing is edited but a temporary copy of the checkout.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

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


EDITS = r"""
# attention scores are not divided by sqrt(d_k): paper/attention, test_eq_1_by_hand
-  * queries.size(-1) ** -0.5
+
# the kernel's scores are divided by the root of the padded width:
# paper/attention, test_the_kernel_is_given_what_makes_it_equal_padding
- scale=d_k**-0.5
+ scale=width**-0.5
# a position sees the next one: paper/attention, test_self_attention_equals_its_definition
- None if causal else mask, is_causal=causal
+ None if causal else mask
# padding is attended to: paper/batch, paper/test_attention.py::test_self_attention_equals_its_definition
- to_device(is_token, self.device)
+ to_device(is_token | True, self.device)
# label smoothing spreads over V tokens, the target among them: paper/loss, test_loss_nats_and_gradient_by_hand
- label_smoothing / (len(embedding) - 1)
+ label_smoothing / len(embedding)
# the smoothed loss expects the target twice: paper/loss, test_loss_nats_and_gradient_by_hand
- extra = 1 - label_smoothing - share
+ extra = 1 - label_smoothing
# the perplexity is that of the smoothed loss: paper/loss, test_loss_nats_and_gradient_by_hand
- torch.float32)), nats_of_target
+ torch.float32)), loss
# the gradient forgets the smoothing: paper/loss, test_loss_nats_and_gradient_by_hand
- .sub_(share)
+ .sub_(0)
# a deterministic loss is compiled: paper/loss, test_compiled_it_is_one_graph_for_whole_chunks_and_one_more
- compiled and not torch.are_deterministic_algorithms_enabled()
+ compiled
# nats are summed in 32 bits: paper/loss, test_nats_are_summed_in_64_bits
- (nats[:tokens].sum(dtype=torch.float64)
+ (nats[:tokens].sum()
# Adam's beta2 is torch's: conf/config.yaml, config/test_compose.py::test_the_base_row_has_the_papers_values
- adam_beta2: 0.98
+ adam_beta2: 0.999
# the learning rate falls from the start: paper/schedule, test_eq_3_by_hand
- min(step**-0.5, step * warmup_steps**-1.5)
+ step**-0.5
# the norm stands before the residual sum:
# paper/layers, paper/test_transformer.py::test_it_is_torch_s_transformer_with_dropout_in_two_places
- self.norm(x + dropped if self.residual else dropped)
+ x + self.norm(dropped)
# dropout falls on the residual sum:
# paper/layers, paper/test_transformer.py::test_it_is_torch_s_transformer_with_dropout_in_two_places
- self.dropout(sublayer_of_x, randomness)
-         return self.norm(x + dropped if
+ self.dropout(x + sublayer_of_x, randomness)
+         return self.norm(dropped if
# embeddings are not multiplied by sqrt(d_model):
# paper/transformer, test_it_is_torch_s_transformer_with_dropout_in_two_places
- self.embedding(tokens) * self.d_model**0.5
+ self.embedding(tokens)
# the decoder sees the token that it is to predict: data/update_plan, test_the_decoder_input_is_the_target_offset_by_one
- target_input[1:] = target[:-1]
+ target_input[:] = target
# the plan drops the last sentence of an epoch:
# data/update_plan, test_an_epoch_has_every_sentence_once_within_the_budget
- order = pool[np.argsort(key, kind="stable")]
+ order = pool[np.argsort(key, kind="stable")[:-1]]
# the length penalty counts from 6: paper/beam_search, test_the_score_is_the_penalised_log_probability
- return ((5 + length) / 6) ** length_penalty
+ return ((6 + length) / 6) ** length_penalty
# a beam stops at its first finished hypothesis: paper/beam_search, test_the_search_equals_a_slow_one
- reachable = self.alive[:, 0] / self.longest_penalty
+ reachable = self.alive[:, 0] - torch.inf
# decoding.max_extra is fixed at 50:
# paper/beam_search, evaluation/test_evaluate.py::test_a_translation_may_be_longer_by_max_extra
- source_offsets.diff() + max_extra
+ source_offsets.diff() + 50
# BLEU leaves German compounds whole: evaluation/metrics, test_paper_tokens_are_moses_tokens_with_compounds_split
- tokens) if language == "de"
+ tokens) if False
# each rank divides by its own tokens: training/lightning_model, test_1_against_500_target_tokens_weigh_1_and_500
- (loss / update.target_tokens).backward()
+ (loss / len(batch.target)).backward()
# a resumed run repeats its last update: training/lightning_model, test_a_restored_run_goes_on_bit_for_bit
- self.updates_done = checkpoint["updates_done"]
+ self.updates_done = checkpoint["updates_done"] - 1
# a resumed run forgets Adam's moments: training/lightning_model, test_a_restored_run_goes_on_bit_for_bit
- self.restored = checkpoint["optimizer_states"]
+ self.restored = []
# a non-finite loss is not in found_inf: training/lightning_model, test_nothing_moves_when_anything_is_not_finite
- (norm + sums[:2].sum())
+ norm
# a checkpoint with any hash is intact: runs/checkpoint, test_a_damaged_newest_is_named_and_the_one_before_is_used
- return there and hash_file.read_text("utf-8-sig", "replace").split()[:1] == [storage.sha256(path)]
+ return there
# the mean of checkpoints is their sum:
# runs/checkpoint, evaluation/test_evaluate.py::test_averaging_is_the_mean_of_the_weights
- total.pop(name) / len(paths)
+ total.pop(name)
# a checkpoint goes before its successor is verified:
# runs/checkpoint, test_no_checkpoint_goes_before_its_successor_is_verified
- is_intact(files[0])
+ True
# staleness ignores decoding: runs/records, tables/test_table3.py::test_a_run_of_other_values_than_its_row_is_stale
- "scale.", "decoding.")
+ "scale.")
# the paper's figures stand beside other conditions:
# runs/records, test_the_papers_figures_stand_beside_its_conditions_alone
- is_row = "+" not in run.experiment and
+ is_row = True or
# initial weights ignore the seed: runs/models, training/test_train.py::test_the_seed_decides_weights_order_and_dropout
-     torch.manual_seed(config.seed)
+     torch.manual_seed(1)
# the order of sentences ignores the seed: training/train, test_the_seed_decides_weights_order_and_dropout
- **sizes, seed=run.seed, start=record.start
+ **sizes, seed=1, start=record.start
# bf16-mixed trains in float32: training/train, test_products_are_computed_in_the_precision_asked_for
-         precision=run.hardware.precision,  # type: ignore[arg-type]
+
# a step is taken with this rank's gradient alone:
# training/lightning_model, test_gradients_become_their_sums_over_the_ranks
- all_reduce(flat)
+ all_reduce(flat.clone())
# the interval of an equality is that of 95 %:
# tables/paper_claims, test_interval_over_sentences_is_95_and_for_equality_90
- ERROR_RATE / (1 if claim.equal else 2)
+ ERROR_RATE / 2
# p-values are not corrected: tables/paper_claims, test_p_values_are_corrected_for_their_number
- iter(stats.false_discovery_control(known).tolist() if known else [])
+ iter(known)
# rows that differ share a spread: tables/paper_claims, test_a_p_value_is_two_sided_and_welchs_if_rows_differ
- stats.bartlett(*samples).pvalue >= ERROR_RATE
+ True
# a contradiction needs no sentences: tables/paper_claims, test_a_verdict_on_bleu_needs_enough_sentences
- if not (low < least and most < high if for_it else most < low or least > high):
+ if for_it and not (low < least and most < high):
# the sentences of one seed stand for all: tables/paper_claims, test_the_papers_figures_reproduce_every_claim
- np.mean(scores, 0) for row
+ scores[0] for row
# not worse has no margin:
# tables/paper_claims, tables/test_beyond.py::test_figures_like_the_literatures_reproduce_every_claim
- -margin if self.equal or self.not_worse else
+ -margin if self.equal else
# a table mixes runs of several texts: tables/table3, test_rows_are_compared_on_one_text_only
- claims = {**claims_of(trained[name]), **shared}
+ claims = claims_of(trained[name])
# rows of other source are not named: tables/table3, test_rows_of_other_code_or_another_processor_are_named
- if value != known[0][1]]
+ if False]
# relative positions count from the key: alternatives/scores, test_values_and_gradients_are_those_of_the_naive_gather
- index = distance.clamp
+ index = (-distance).clamp
# additive scores are linear: alternatives/scores, test_additive_scores_have_a_vector_for_each_head
- (queries.unsqueeze(-2) + keys.unsqueeze(-3)).tanh()
+ queries.unsqueeze(-2) + keys.unsqueeze(-3)
# label smoothing changes no result: config/schema, test_every_key_is_result_affecting_or_a_runtime_key
- label_smoothing: float = _number(0.0, below=1.0, affects_result=True)
+ label_smoothing: float = _number(0.0, below=1.0, affects_result=False)
# dev is newstest2012: data/wmt14, test_dev_and_test_are_the_papers_and_no_side_is_swapped
- dev=Part(NEWSTEST, "dev/newstest2013-src.en.sgm", "dev/newstest2013-ref.de.sgm")
+ dev=Part(NEWSTEST, "dev/newstest2012-src.en.sgm", "dev/newstest2012-ref.de.sgm")
# Common Crawl has its sides swapped: data/wmt14, test_dev_and_test_are_the_papers_and_no_side_is_swapped
- "commoncrawl.de-en.en", "commoncrawl.de-en.de"
+ "commoncrawl.de-en.de", "commoncrawl.de-en.en"
# weights of ranks are not compared: training/callbacks, test_only_rank_0_writes_measures_and_saves
-             agree(module
+             (lambda *_: None)(module
# a variation is compared with base: tables/variations, test_a_variation_is_averaged_and_compared_with_its_own_row
- replace(line, runs=()))
+ tables[0].base)
# a warned sweep is not requeued: sweep/launcher, test_a_signal_reaches_the_runs_at_work_and_starts_no_other
- slurm.requeue_after(stop.asked)
+ pass
# a worker is a rank of another launcher's group: runs/jobs, test_a_start_writes_config_and_log_and_removes_leftovers
-  if key not in FOREIGN
+
# a worker imports the user's own files: runs/jobs, test_a_start_writes_config_and_log_and_removes_leftovers
- , "PYTHONSAFEPATH": "1"
+
"""


def read(edits: str) -> dict[str, Mutant]:
    """The mutants by name: `# NAME: MODULE, TEST`, what stands in the module, and what is put in its place.

    A module is named as below `src/aiayn/`, a test alone where it is in the module's own file.
    """
    found, edit = {}, r"((?:# .*\n)+)((?:- .*\n)+)((?:\+.*\n)+)"
    assert not re.sub(edit, "", edits).strip(), "an edit that is written in another form would not be tried"
    for head, *changed in re.findall(edit, edits):
        name, _, place = head.removeprefix("# ").replace("\n# ", " ").strip().rpartition(": ")
        module, test = place.split(", ")
        path, (old, new) = PurePath(module), ("\n".join(line[2:] for line in part.splitlines()) for part in changed)
        file, own = f"src/aiayn/{module}.py", f"tests/{path.parent}/test_{path.name}.py::{test}"
        found[name] = Mutant(module if path.suffix else file, old, new, f"tests/{test}" if "::" in test else own)
    return found


MUTANTS = read(EDITS)


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
