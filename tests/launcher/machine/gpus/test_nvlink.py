from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pynvml
import pytest

from dsrun.launcher.machine import read as probe
from dsrun.launcher.machine.gpus import nvlink as probe_nvlink
from dsrun.launcher.machine.gpus import read as probe_gpu
from dsrun.launcher.machine.gpus import state as probe_gpu_state
from dsrun.launcher.machine.gpus.nvlink import NvLinkPeer, NvLinks, links_between, read_peer_access
from support.machines import recorded_machine
from support.nvml import NVMLError


def links(switches: int = 0, **peers: int) -> NvLinks:
    return NvLinks(
        version=4,
        active=switches + sum(peers.values()),
        inactive=0,
        to_switches=switches,
        peers=tuple(NvLinkPeer(address=address, links=count) for address, count in peers.items()),
        link_mbyte_s=None,
        errors=None,
        fabric=None,
    )


def test_links_to_switches_reach_every_gpu_on_them() -> None:
    assert links_between(links(18), "a", links(18), "b") == 18
    # One lost a link: that is all that is left between the two.
    assert links_between(links(18), "a", links(17), "b") == 17


def test_links_between_two_gpus_count_for_these_two() -> None:
    assert links_between(links(b=4), "a", links(a=4), "b") == 4
    assert links_between(links(b=4), "a", links(d=4), "c") == 0


def test_a_link_is_known_from_either_end() -> None:
    assert links_between(links(b=2), "a", links(), "b") == links_between(links(), "b", links(b=2), "a") == 2


def test_a_dgx_has_links_to_switches_and_its_fabric_is_ready(tmp_path: Path) -> None:
    gpus = recorded_machine("dgx_h100", tmp_path).report().gpus
    assert {gpu.nvlink for gpu in gpus} == {replace(links(18), link_mbyte_s=26562, errors=0, fabric="completed")}


def test_bridged_cards_name_each_other(tmp_path: Path) -> None:
    nvlink = recorded_machine("workstation", tmp_path).report().gpus[2].nvlink
    assert nvlink is not None
    assert nvlink.peers == (NvLinkPeer(address="0000:42:00.0", links=4),)
    assert (nvlink.active, nvlink.to_switches, nvlink.fabric) == (4, 0, None)


def test_access_to_the_memory_of_others_has_the_words_of_nvidia_smi() -> None:
    status = {(0, 1): 0, (0, 2): 2, (0, 3): 99}

    def p2p(one: int, other: int, kind: int) -> int:
        if (one, other) not in status:
            raise NVMLError("not found")
        return status[one, other]

    nvml = SimpleNamespace(NVMLError=NVMLError, nvmlDeviceGetP2PStatus=p2p)
    assert read_peer_access(nvml, 0, 0, range(5)) == ("X", "OK", "GNS", "U", "U")


def test_the_gpus_of_a_dgx_reach_each_others_memory(tmp_path: Path) -> None:
    gpus = recorded_machine("dgx_a100", tmp_path).report().gpus
    assert gpus[1].peer_access == ("OK", "X", *["OK"] * 6)


@pytest.mark.parametrize(
    "module", [probe, probe_gpu, probe_gpu_state, probe_nvlink], ids=lambda module: module.__name__
)
def test_every_question_is_one_that_pynvml_knows(module: ModuleType) -> None:
    names = set(re.findall(r"\b(?:c_)?nvml[A-Z]\w+", inspect.getsource(module)))
    # A comment's name for several, and a field of an answer.
    names -= {"nvmlClocksEventReason", "nvmlReturn"}
    assert names
    assert {name for name in names if not hasattr(pynvml, name)} == set()


def test_a_gpu_without_links_has_none(tmp_path: Path) -> None:
    nvlink = recorded_machine("l40s_pcie", tmp_path).report().gpus[0].nvlink
    assert nvlink == replace(links(), version=None)


def test_all_links_that_a_driver_may_number_are_asked_for() -> None:
    """A GPU of which the last link that NVML can number is down: its 36 links are told."""
    nvml = SimpleNamespace(NVMLError=NVMLError, nvmlDeviceGetNvLinkState=lambda handle, link: int(link < 35))
    found = probe_nvlink.read_nvlinks(nvml, 0)
    assert (found.active, found.inactive) == (35, 1)
    assert found.active + found.inactive == pynvml.NVML_NVLINK_MAX_LINKS
