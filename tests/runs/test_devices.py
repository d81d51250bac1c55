"""Devices: nobody takes what another has, and workers see theirs alone."""

import dataclasses
import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from aiayn.config import compose
from aiayn.runs import devices


@pytest.fixture
def hardware() -> dict[str, compose.Config]:
    return {name: compose.compose_row(f"hardware={name}").hardware for name in ("cpu", "gpu")}


def test_a_cpu_has_as_many_devices_as_their_threads_fit(hardware, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(7)))
    for threads, each, expected in ((1, 1, 7), (2, 1, 3), (3, 5, 5), (64, 1, 1)):
        assert len(devices.names(dataclasses.replace(hardware["cpu"], threads=threads, devices=each))) == expected
    assert len(devices.names(hardware["cpu"], 11)) == 11


def test_more_gpus_than_there_are_is_refused(hardware, monkeypatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: ["GPU-a", "GPU-b", "GPU-c"])
    with pytest.raises(
        compose.ConfigError, match=r"hydra\.launcher\.devices=4: must be at most 3, .* give hardware\.dev"
    ):
        devices.names(dataclasses.replace(hardware["gpu"], devices=2), 4)
    wide = dataclasses.replace(hardware["gpu"], devices=4)
    with pytest.raises(compose.ConfigError, match=r"hardware\.devices=4: must be at most 3, all devices that torch"):
        devices.Pool(wide, devices.names(wide))


def test_runs_share_gpus_where_more_devices_are_asked_for(hardware, monkeypatch) -> None:
    a, b = gpus = named("s", "t")
    monkeypatch.setattr(devices, "gpus", lambda: gpus)
    pool = devices.Pool(hardware["gpu"], devices.names(hardware["gpu"], 5))
    with ExitStack() as held:
        seen = [pool.take(1, held) for _ in range(6)]
        assert devices.Pool(hardware["gpu"], gpus).take(1, held) is None
    assert seen == [*({"CUDA_VISIBLE_DEVICES": gpu} for gpu in (a, b, a, b, a)), None]


def named(*letters: str) -> list[str]:
    """GPUs that no other process of this machine has."""
    return [f"GPU-{letter}{os.getpid()}" for letter in letters]


def test_a_gpu_has_one_run_at_a_time_whose_workers_see_it_alone(hardware) -> None:
    one, other = (devices.Pool(hardware["gpu"], named("a", "b", "c")) for _ in range(2))
    with ExitStack() as first, ExitStack() as second:
        assert one.take(2, first) == {"CUDA_VISIBLE_DEVICES": ",".join(named("a", "b"))}
        assert one.take(2, second) is None
        assert other.take(2, second) is None
        assert other.take(1, second) == {"CUDA_VISIBLE_DEVICES": named("c")[0]}
        assert one.take(1, first) is None
        second.close()
        assert one.take(1, first) == {"CUDA_VISIBLE_DEVICES": named("c")[0]}
        first.close()
        assert other.take(3, second) == {}  # all: what this process sees, under whatever name
    cores = [devices.Pool(hardware["cpu"], ["0", "1"]) for _ in range(2)]
    with ExitStack() as held:  # control: cores are shared with other commands, not with other runs of this one
        assert [pool.take(2, held) for pool in (*cores, cores[0])] == [{}, {}, None]


def test_a_limit_is_a_number_of_gpus_and_not_the_first_ones(hardware, monkeypatch) -> None:
    gpus = named("u", "v", "w")
    monkeypatch.setattr(devices, "gpus", lambda: gpus)
    other, limited = (devices.Pool(hardware["gpu"], devices.names(hardware["gpu"], n), n) for n in (0, 2))
    with ExitStack() as held:
        seen = [pool.take(1, held) for pool in (other, limited, limited)]
        assert seen == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
        held.close()
        assert [limited.take(1, held) is None for _ in gpus] == [False, False, True]
    wide = dataclasses.replace(hardware["gpu"], devices=3)
    with pytest.raises(compose.ConfigError, match=r"devices=3: must be at most 2, hydra\.launcher\.devices"):
        devices.Pool(wide, gpus, 2)


def test_a_process_that_is_killed_gives_its_gpu_back(hardware) -> None:
    code = (
        "from aiayn.runs import devices; import contextlib, time; held = contextlib.ExitStack()\n"
        f"devices._locked({named('k')[0]!r}, held); print('held', flush=True); time.sleep(99)"
    )
    command = [sys.executable, "-c", code]
    pool = devices.Pool(hardware["gpu"], named("k"))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner, ExitStack() as held:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"held\n"
        assert pool.take(1, held) is None
        owner.kill()
        owner.wait()
        assert pool.take(1, held) == {}


def test_runs_that_start_at_once_have_ports_of_their_own(monkeypatch) -> None:
    first = devices.PORTS[7 * os.getpid() % 9000]
    monkeypatch.setattr(devices, "PORTS", range(first, first + 50))
    with ExitStack() as held, socket.socket() as stranger:
        ports = [devices.port(held) for _ in range(5)]
        assert len(set(ports)) == 5
        stranger.bind(("127.0.0.1", max(ports) + 1))
        stranger.listen()
        assert devices.port(held) > max(ports) + 1
    monkeypatch.setattr(devices, "PORTS", range(first, first + 1))
    with ExitStack() as held:
        assert devices.port(held) == first
        with pytest.raises(compose.ConfigError, match="no port from"):
            devices.port(held)
