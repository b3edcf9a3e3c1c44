"""What a machine is taken for where its speeds are not known."""

from __future__ import annotations

from dataclasses import replace

from dsrun.estimate.run.catalogue import CAUTIOUS, CAUTIOUS_CORE_FLOPS
from dsrun.estimate.run.machine import Machine, Speeds
from support.planned_machines import gpus


def test_a_cautious_speed_takes_the_place_of_an_unknown_one_alone() -> None:
    machine = replace(gpus("L40S-48G", 16), given=Speeds(nvme_read=7e9))
    known, cautious = machine.speeds(half=True), machine.with_cautious_speeds().speeds(half=True)
    unknown = {name for name in Speeds.names() if getattr(known, name) is None}
    assert unknown == {"network", "ddr", "nvme_write"}
    for name in Speeds.names():
        assert getattr(cautious, name) == (CAUTIOUS[name] if name in unknown else getattr(known, name))


def test_every_speed_has_a_cautious_one() -> None:
    assert set(CAUTIOUS) == set(Speeds.names())


def test_a_core_is_taken_to_compute_like_a_core() -> None:
    processors = Machine(label="cpu", ranks=4, ranks_per_host=2, given=Speeds(network=1e9))
    taken = processors.with_cautious_speeds().speeds(half=True)
    assert (taken.flops, taken.network, taken.peer) == (CAUTIOUS_CORE_FLOPS, 1e9, CAUTIOUS["peer"])
    unlisted = replace(gpus("A100-80G"), gpu=None).with_cautious_speeds()
    assert unlisted.speeds(half=False).flops == CAUTIOUS["flops"]


def test_a_machine_of_which_all_is_known_is_left_as_it_is() -> None:
    machine = replace(gpus("H100-80G", 16), given=Speeds(nvme_read=7e9, nvme_write=3e9))
    assert machine.with_cautious_speeds() is machine
