from __future__ import annotations

from pathlib import Path

from dsrun.launcher.probe_nvlink import NvLinkPeer, NvLinks, links_between
from support.machines import recorded_machine


def links(switches: int = 0, **peers: int) -> NvLinks:
    return NvLinks(
        version=4,
        active=switches + sum(peers.values()),
        inactive=0,
        to_switches=switches,
        peers=tuple(NvLinkPeer(address=address, links=count) for address, count in peers.items()),
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
    assert {gpu.nvlink for gpu in gpus} == {
        NvLinks(version=4, active=18, inactive=0, to_switches=18, peers=(), fabric="completed")
    }


def test_bridged_cards_name_each_other(tmp_path: Path) -> None:
    nvlink = recorded_machine("workstation", tmp_path).report().gpus[2].nvlink
    assert nvlink is not None
    assert nvlink.peers == (NvLinkPeer(address="0000:42:00.0", links=4),)
    assert (nvlink.active, nvlink.to_switches, nvlink.fabric) == (4, 0, None)


def test_a_gpu_without_links_has_none(tmp_path: Path) -> None:
    nvlink = recorded_machine("l40s_pcie", tmp_path).report().gpus[0].nvlink
    assert nvlink == NvLinks(version=None, active=0, inactive=0, to_switches=0, peers=(), fabric=None)
