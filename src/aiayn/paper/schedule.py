"""The learning rate of section 5.3."""


def learning_rate(step: int, d_model: int, warmup_steps: int) -> float:
    """d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), Eq. 3, for the update number `step`, from 1."""
    assert step >= 1, "Eq. 3 counts updates from 1"
    return float(d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))
