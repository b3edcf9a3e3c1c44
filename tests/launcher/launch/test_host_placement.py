from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.errors import HostfileError, UsageError
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.launch.host_placement import HostRequest, Placement, place
from dsrun.launcher.transport.choice import TransportName

NAMES = frozenset({"box", "box.lab"})
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}


def no_gpu_counts() -> int:
    raise AssertionError("the hosts say how many ranks there are, not this machine's GPUs")


def placed(folder: Path, text: str, *, environ: dict[str, str] | None = None, **request: object) -> Placement:
    """Where a job with this hostfile goes."""
    path = folder / "hosts"
    path.write_text(text)
    asked = HostRequest(hostfile=str(path), **request)  # type: ignore[arg-type]
    return place(asked, environ=environ or {}, local_names=NAMES, device_count=no_gpu_counts)


def in_slurm(environ: dict[str, str], **request: object) -> Placement:
    asked = HostRequest(**request)  # type: ignore[arg-type]
    return place(asked, environ=environ, local_names=NAMES, device_count=no_gpu_counts)


def names(hosts: tuple[HostSpec, ...]) -> list[str]:
    return [host.name for host in hosts]


def test_without_hosts_a_job_runs_here_on_all_gpus() -> None:
    here = place(HostRequest(), environ={}, local_names=NAMES, device_count=lambda: 4)
    assert (here.allocation.world_size, here.local_hosts, here.remote_hosts) == (4, {"localhost"}, ())


def test_this_machine_is_known_by_its_name_and_the_others_are_reached_over_ssh(tmp_path: Path) -> None:
    found = placed(tmp_path, "box slots=2\nworker-1 slots=4\n")
    assert (found.local_hosts, names(found.remote_hosts), found.transport) == ({"box"}, ["worker-1"], "ssh")


@pytest.mark.parametrize("key", ["user=ada", "port=2222", "addr=10.0.0.4"])
def test_a_host_of_this_machines_name_that_says_how_it_is_reached_is_another(tmp_path: Path, key: str) -> None:
    found = placed(tmp_path, f"box slots=2 {key}\n")
    assert (found.local_hosts, names(found.remote_hosts)) == (frozenset(), ["box"])


def test_a_hostfile_of_this_machine_alone_needs_no_way(tmp_path: Path) -> None:
    found = placed(tmp_path, "localhost slots=2\n", transport="openssh")
    assert (found.local_hosts, found.transport, found.remote_hosts) == ({"localhost"}, "local", ())


@pytest.mark.parametrize("transport", ["ssh", "openssh"])
def test_the_way_is_what_was_asked_for(tmp_path: Path, transport: TransportName) -> None:
    assert placed(tmp_path, "w1 slots=2\n", transport=transport).transport == transport


def test_every_host_can_be_this_machine(tmp_path: Path) -> None:
    found = placed(tmp_path, "w[1-3] slots=2\n", transport="local")
    assert (found.local_hosts, found.allocation.world_size) == ({"w1", "w2", "w3"}, 6)


def test_this_machine_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(HostfileError) as caught:
        placed(tmp_path, "box slots=2\nw1 slots=1\nlocalhost slots=2\n")
    path = tmp_path / "hosts"
    assert caught.value.render() == (
        f"error: {path}:3: `localhost` is this machine, as is `box` ({path}:1)\n"
        "hint: give each host one line and add up the slots"
    )


def test_a_port_is_for_hosts_that_name_none(tmp_path: Path) -> None:
    found = placed(tmp_path, "w1 slots=1\nw2 slots=1 port=23\n", ssh_port=2222)
    assert [host.port for host in found.allocation.hosts] == [2222, 23]


def test_filters_and_counts_choose_among_the_hosts(tmp_path: Path) -> None:
    assert names(placed(tmp_path, "w[1-3] slots=2\n", nodes=2).remote_hosts) == ["w1", "w2"]
    (only,) = placed(tmp_path, "w[1-3] slots=2\n", include="w2:1").remote_hosts
    assert (only.name, only.gpus) == ("w2", (1,))
    with pytest.raises(HostfileError, match="host `w1` has 2 slots"):
        placed(tmp_path, "w[1-3] slots=2\n", ranks_per_host=3)


def test_hosts_of_a_file_without_slots_take_the_number_of_ranks_that_was_asked_for(tmp_path: Path) -> None:
    assert placed(tmp_path, "w1\nw2\n", ranks_per_host=4).allocation.world_size == 8
    assert placed(tmp_path, "w1\nw1\nw2\nw2\n").allocation.world_size == 4
    with pytest.raises(HostfileError, match="host `w1` has 2 slots"):
        placed(tmp_path, "w1\nw1\nw2\nw2\n", ranks_per_host=4)
    with pytest.raises(HostfileError, match="`-n 0`: expected 1 or more"):
        placed(tmp_path, "w1 slots=1\n", ranks_per_host=0)


def test_inside_a_slurm_job_its_hosts_are_taken_and_reached_with_srun() -> None:
    found = in_slurm(SLURM)
    assert (names(found.remote_hosts), found.transport, found.allocation.world_size) == (["n1", "n2"], "srun", 8)


def test_a_step_is_started_on_the_host_of_the_batch_script_too() -> None:
    found = in_slurm({**SLURM, "SLURM_JOB_NODELIST": "box,n2"})
    assert (found.local_hosts, names(found.remote_hosts)) == (frozenset(), ["box", "n2"])


def test_a_slurm_job_of_this_machine_alone_needs_no_step() -> None:
    found = in_slurm({**SLURM, "SLURM_JOB_NODELIST": "box"})
    assert (found.local_hosts, found.transport, found.allocation.world_size) == ({"box"}, "local", 4)


def test_the_number_of_ranks_is_the_users_where_slurm_gives_the_hosts() -> None:
    assert in_slurm(SLURM).slots_from_scheduler
    assert not in_slurm(SLURM, ranks_per_host=6).slots_from_scheduler
    assert not in_slurm(SLURM, include="n1:0").slots_from_scheduler
    assert in_slurm(SLURM, ranks_per_host=6).allocation.world_size == 12
    with pytest.raises(HostfileError, match="`-n 6` and `--include` cannot be used together"):
        in_slurm(SLURM, ranks_per_host=6, include="n1")


def test_a_hostfile_comes_before_the_slurm_job(tmp_path: Path) -> None:
    found = placed(tmp_path, "w1 slots=1\n", environ=SLURM)
    assert (names(found.remote_hosts), found.transport) == (["w1"], "ssh")


def test_srun_without_a_slurm_job_is_refused() -> None:
    with pytest.raises(UsageError, match="`--transport srun` needs a Slurm job, and this process runs in none"):
        in_slurm({}, transport="srun")
