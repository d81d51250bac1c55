"""The list of mutants fits the source, and every mutant dies (slow)."""

import mutants
import pytest
from mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_fits_and_names_a_test_that_exists(name: str) -> None:
    mutant = MUTANTS[name]
    mutants.mutated(mutant, (ROOT / mutant.file).read_text())
    path, _, test = mutant.test.partition("::")
    assert f"def {test}(" in (ROOT / path).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1, 2])  # in three parts, for two test processes to share
def test_every_mutant_is_killed(first: int) -> None:
    assert mutants.main([*MUTANTS][first::3]) == 0


@pytest.mark.slow
def test_a_mutant_that_changes_nothing_survives(monkeypatch: pytest.MonkeyPatch) -> None:  # control
    one = next(iter(MUTANTS.values()))
    monkeypatch.setattr(mutants, "MUTANTS", {"nothing changes": Mutant(one.file, one.old, one.old, one.test)})
    assert mutants.main([]) == 1
