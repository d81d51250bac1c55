"""A model as Lightning trains it: one `training_step` is one update of section 5."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed
from torch import Tensor, nn

from aiayn.alternatives.recurrent import TranslationModel
from aiayn.config.schema import Training
from aiayn.core.exit_codes import NON_FINITE, ExplainedError
from aiayn.paper.batch import to_host
from aiayn.paper.loss import label_smoothed_cross_entropy
from aiayn.paper.schedule import learning_rate
from aiayn.paper.transformer import Transformer
from aiayn.training.lightning_data import Update


class NonFinite(ExplainedError):
    """The loss or the gradient is NaN or infinite: training stopped, and the optimiser did nothing with it."""

    exit_code = NON_FINITE


@dataclass(frozen=True)
class PendingStep:
    """A step that the device may not have finished."""

    update: Update
    learning_rate: float
    names: list[str]  # of the P parameters
    figures: Tensor  # (3 + P + 1,) the three sums, the gradients' norms and their norm: on the host, once waited for
    wait: Callable[[], None]


class LightningTransformer(pl.LightningModule):
    """A model, most often a Transformer, with its optimiser (5.3), its loss (5.4) and the number of updates done."""

    def __init__(self, transformer: TranslationModel, recipe: Training, seed: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.transformer = transformer
        self.recipe = recipe
        self.seed = seed
        self.updates_done = 0
        self.ranks = 1  # that share each update
        self.pending: PendingStep | None = None
        self.wants_to_stop: Callable[[], bool] = lambda: False  # asked of each rank at each update
        self.one_wants_to_stop = False  # as all ranks know it of the last step that is no longer pending
        self.restored: list[dict[str, Any]] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam as section 5.3 has it: no weight decay, no clipping; after a restart, with the moments it had."""
        # Paper: silent on clipping and weight decay; the released code has neither
        betas = (self.recipe.adam_beta1, self.recipe.adam_beta2)
        adam = torch.optim.Adam(
            self.transformer.parameters(), lr=0.0, betas=betas, eps=self.recipe.adam_epsilon, fused=True
        )
        for state in self.restored:
            adam.load_state_dict(state)
        return adam

    def training_step(self, update: Update, batch_index: int) -> dict[str, Tensor | float | int]:
        """One optimiser step; the sums of loss and unsmoothed nats over all ranks, to be read once it is not pending.

        The gradient is that of the summed loss divided once by the update's target tokens over all ranks and
        micro-batches. Where it is not finite, nothing moves, and `wait_for_step` raises: here for the update before, so
        that the device computes this one meanwhile.
        """
        optimizer = self.optimizers()
        assert isinstance(optimizer, pl.core.optimizer.LightningOptimizer)
        optimizer.zero_grad()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, nats, ranks that want to stop
        sums[2].fill_(int(self.wants_to_stop()))  # assigned, it would be copied, and the GPU waited for
        for batch in update.batches:
            loss, nats = label_smoothed_cross_entropy(
                self.transformer.hidden(batch, (self.seed, update.number)),
                self.transformer.embedding.weight,
                batch.target,
                self.recipe.label_smoothing,
                compiled=isinstance(self.transformer, Transformer) and self.transformer.is_compiled(),
            )
            # Paper: silent on how losses are averaged; the released code divides by the whole update's tokens
            with torch.autocast(self.device.type, enabled=False):  # as torch recommends: in the types of forward
                (loss / update.target_tokens).backward()  # type: ignore[no-untyped-call]
            sums[:2] += torch.stack((loss.detach().double(), nats.double()))
        if self.ranks > 1:
            sum_gradients(self.transformer.parameters())
            torch.distributed.all_reduce(sums)
        eq_3 = learning_rate(update.number + 1, self.transformer.d_model, self.recipe.warmup_steps)
        rate = self.recipe.learning_rate_factor * eq_3
        self.wait_for_step()
        gradients = {name: p.grad for name, p in self.transformer.named_parameters() if p.grad is not None}
        # torch's public functions give one norm of all gradients, or launch a kernel for each
        norms = torch.stack(torch._foreach_norm(list(gradients.values())))
        norm = torch.linalg.vector_norm(norms)
        figures, wait = to_host(torch.cat((sums, norms, norm.unsqueeze(0))))
        for group in optimizer.param_groups:
            group["lr"] = rate
        # Where this is 1, fused Adam leaves everything as it is, step count too: made for torch's GradScaler
        optimizer.optimizer.found_inf = (norm + sums[:2].sum()).isfinite().logical_not().float()  # type: ignore[attr-defined]
        optimizer.step()
        self.pending = PendingStep(update, rate, list(gradients), figures, wait)
        return {"loss": figures[0], "nats": figures[1], "gradient_norm": figures[-1], "learning_rate": rate}

    def wait_for_step(self) -> None:
        """Waits for the pending step, before weights are read; raises NonFinite, on every rank alike, if it failed."""
        if self.pending is None:
            return
        step, self.pending = self.pending, None
        step.wait()
        finite, number = step.figures.isfinite().tolist(), step.update.number + 1
        if not all(finite):
            bad = [name for name, is_finite in zip(step.names, finite[3:-1], strict=True) if not is_finite]
            loss = float(step.figures[0]) / step.update.target_tokens
            raise NonFinite(
                f"update {number}: loss {loss:g} at learning rate {step.learning_rate:g}; first parameter with a"
                f" non-finite gradient: {bad[0] if bad else 'none'}; no step was taken"
            )
        self.updates_done = number
        self.one_wants_to_stop = bool(step.figures[2])

    def on_train_end(self) -> None:
        """Leaves no step pending."""
        self.wait_for_step()

    def saved(self) -> dict[str, Any]:
        """Weights, moments and the number of updates: all else is a function of the configuration."""
        states = [adam.state_dict() for adam in self.trainer.optimizers]
        return {"state_dict": self.state_dict(), "optimizer_states": states, "updates_done": self.updates_done}

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Takes up the run from what `saved` gave; call before the trainer starts."""
        self.load_state_dict(checkpoint["state_dict"])
        self.restored = checkpoint["optimizer_states"]
        self.updates_done = checkpoint["updates_done"]


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Puts the sum over all ranks in the place of each gradient; one that a rank does not have counts as zero.

    Sent at once, after the backward pass: a compiled stack hands over all its gradients at its end. torch's
    DistributedDataParallel rearranges its buckets after the first update, so that a resumed run has other bits; it
    averages where we sum; and it waits for a rank whose share of an update has no sentence left.
    """
    parameters = list(parameters)
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    torch.distributed.all_reduce(flat)
    for parameter, total in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        parameter.grad = total.view_as(parameter)
