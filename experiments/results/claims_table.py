"""Prints the verdicts on the paper's claims about Table 3 in Markdown, as `aiayn report` has them, from finished runs.

    python experiments/results/claims_table.py scale=small

The words are those of `aiayn report`; what `aiayn prepare` makes with them has to be there.
"""

import sys

from tabulate import tabulate

from aiayn.config import compose
from aiayn.report import contents
from aiayn.tables import formats

COLUMNS = {
    "sentence": "claim",
    "metric": "",
    "rows": "rows, worst first",
    "paper": "paper",
    "ours": "ours",
    "interval": "95 % over seeds",
    "sentences": "95 % over sentences",
    "p": "p",
    "verdict": "verdict",
}


NOTE = """\
`a < b`: the paper says that row a is worse than row b; the rise from a to b is in points of BLEU, or in percent of a's
perplexity by which b's is lower. `a = b`: equally good, within 0.4 BLEU or 3.3 % of perplexity. p is corrected for the
number of claims, the intervals are not; a verdict follows p.
"""


def main(*words: str) -> None:
    """A note on how to read it, and one line for each claim."""
    found = [formats.finding_texts(finding) for finding in contents.collect(compose.compose_row(*words)).findings]
    print(NOTE)
    print(tabulate([[texts[key] for key in COLUMNS] for texts in found], list(COLUMNS.values()), tablefmt="github"))


if __name__ == "__main__":
    main(*sys.argv[1:])
