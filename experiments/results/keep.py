"""Copies finished runs without their checkpoints, their metrics thinned, so that they can be committed.

    python experiments/results/keep.py runs/tiny-small experiments/results/small_three_seeds/runs

A copied run is finished for every command but those that need its weights.
"""

import json
import shutil
import sys
from pathlib import Path

FILES = ("config.yaml", "data.sha256", "translations.txt", "result.json")
PER_HUNDREDTH = 2  # lines for each hundredth of the updates
AVERAGED = ("train/loss", "train/nats", "train/gradient_norm")
SUMMED = ("source_tokens", "target_tokens")


def thinned(lines: list[str]) -> list[str]:
    """One line for a group of updates, its last, with their mean losses and all their tokens; each dev measurement.

    No group passes the border of a hundredth of the updates: `aiayn criteria` takes means over hundredths.
    """
    rows = [json.loads(line) for line in lines]
    updates, groups = sum("train/loss" in row for row in rows), 100 * PER_HUNDREDTH
    borders = {round(number * updates / groups) for number in range(1, groups + 1)}
    kept, group, done = [], [], 0
    for line, row in zip(lines, rows, strict=True):
        if "train/loss" not in row:
            kept.append(line)
            continue
        group.append(row)
        done += 1
        if done in borders:
            means = {key: float(f"{sum(row[key] for row in group) / len(group):.6g}") for key in AVERAGED}
            sums = {key: sum(row[key] for row in group) for key in SUMMED}
            kept.append(json.dumps(row | means | sums) + "\n")
            group = []
    return kept


def main(runs: Path, kept: Path) -> None:
    """Copies what is finished and not there yet, row by row and seed by seed."""
    for result in sorted(runs.glob("*/seed*/result.json")):
        folder = kept / result.parent.relative_to(runs)
        if (folder / "result.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        lines = (result.parent / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(thinned(lines)))
        for name in FILES:  # result.json last: with it the run is finished
            shutil.copyfile(result.parent / name, folder / name)
        print(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
