"""The words behind a command: flags anywhere, and what Hydra would misread, quoted."""

import pytest

from aiayn.config import arguments


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("scale=smoke a=1 -cn table3 seed=1,2 -m", "--config-name=table3 --multirun scale='smoke' a=1 seed=1,2"),
        ("-c job a=b --config-name=seeds", "--config-name=seeds --cfg=job a=b"),
        ("output=~/a,~me/b c=d", "output='~/a','~me/b' c=d"),
        ('output="~/a,~b"', 'output="~/a,~b"'),
        ("data.train_target=my_target_file.de", "data.train_target=my_target_file.de"),
    ],
)
def test_flags_come_first_and_a_home_folder_is_quoted(words, expected):
    assert " ".join(arguments.for_hydra("train", words.split(" "))) == expected
