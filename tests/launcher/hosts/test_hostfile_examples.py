"""The examples in hostfiles/ and in the guide say what they are said to say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsrun.errors import HostfileError
from dsrun.launcher.hosts.fields import KEYS
from dsrun.launcher.hosts.hostfile import parse_hostfile, read_hostfile
from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.plan.selection import select

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "hostfiles"
GUIDE = (ROOT / "docs" / "guides" / "hostfiles.md").read_text()

HOSTS: dict[str, list[tuple[str, int, str]]] = {
    "localhost": [("localhost", 2, "localhost")],
    "workstation": [("localhost", 4, "localhost")],
    "four-hosts": [
        ("worker-0", 4, "worker-0"),
        ("worker-1", 4, "worker-1"),
        ("worker-2.lab", 2, "worker-2.lab"),
        ("[fd00::4]", 4, "fd00::4"),
    ],
    "four-boxes": [
        *[(f"box-0{n}", 8, f"10.1.0.1{n}") for n in range(4)],
        *[(f"old-{n}", 4, f"old-{n}") for n in (1, 3, 5, 6)],
    ],
    "ports-and-users": [
        ("lab-1", 2, "lab-1"),
        ("lab-2", 2, "lab-2"),
        ("left", 4, "10.0.0.9"),
        ("right", 4, "10.0.0.9"),
        ("lab-3", 1, "lab-3"),
    ],
    "ipv6": [
        ("[fd00::10]", 4, "fd00::10"),
        ("[fd00::11]", 4, "fd00::11"),
        ("[fd00::12]", 4, "fd00::12"),
        ("worker-3", 4, "fd00::13"),
    ],
    "mpi": [(f"worker-{n}", slots, f"worker-{n}") for n, slots in enumerate((4, 4, 8, 8))],
    "a-line-a-slot": [("x1001", 4, "x1001"), ("x1002", 4, "x1002")],
    "hosts.json": [("worker-0", 8, "10.1.0.10"), ("worker-1", 8, "10.1.0.11"), ("lab-1", 3, "lab-1")],
    "hosts.yaml": [
        ("worker-0", 8, "worker-0"),
        ("worker-1", 8, "worker-1"),
        ("lab-1", 3, "lab-1"),
        ("[fd00::10]", 4, "fd00::10"),
    ],
}


def example(name: str) -> dict[str, HostSpec]:
    return {host.name: host for host in read_hostfile(EXAMPLES / name)}


@pytest.mark.parametrize("name", HOSTS)
def test_example_names_its_hosts_and_can_be_allocated(name: str) -> None:
    hosts = read_hostfile(EXAMPLES / name)
    assert [(host.name, host.slots, host.address) for host in hosts] == HOSTS[name]
    assert select(hosts).world_size == sum(slots for _, slots, _ in HOSTS[name])


def test_every_example_is_tested_and_in_the_guide() -> None:
    names = sorted(path.name for path in EXAMPLES.iterdir())
    assert names == sorted(HOSTS)
    assert sorted(re.findall(r"\(\.\./\.\./hostfiles/([^)]+)\)", GUIDE)) == names


def test_ports_users_and_quotes_of_the_example_arrive() -> None:
    hosts = example("ports-and-users")
    assert {(host.user, host.port) for host in hosts.values()} == {
        ("ada", 2222),
        ("root", 2201),
        ("root", 2202),
        (None, None),
    }
    assert hosts["lab-2"].python == "/home/ada/my envs/torch/bin/python"
    assert (hosts["left"].gpus, hosts["right"].gpus) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert hosts["lab-3"].env == {"NOTE": "quoted; $HOME stays $HOME", "TITLE": "two\nlines"}


def test_json_and_yaml_examples_say_the_same_of_one_host() -> None:
    one, other = (example(name)["lab-1"] for name in ("hosts.json", "hosts.yaml"))
    assert (one.gpus, one.port, one.user, one.python, one.env) == (
        (0, 2, 3),
        2222,
        "ada",
        "/opt/torch/bin/python",
        {"NCCL_IB_DISABLE": "1"},
    )
    assert (one.gpus, one.port, one.user, one.python, one.env) == (
        other.gpus,
        other.port,
        other.user,
        other.python,
        other.env,
    )


def guide_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def test_hostfiles_in_the_guide_are_read() -> None:
    blocks = [block for language in ("hostfile", "json", "yaml") for block in guide_blocks(language)]
    assert [len(parse_hostfile(block, name="guide")) for block in blocks] == [19, 3, 3]


def test_the_guide_has_every_key_and_no_other() -> None:
    table = GUIDE.partition("| key |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([a-z]+)(?:\.NAME)?` ", table, re.MULTILINE) == list(KEYS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker-0", {"worker-0": (0, 1, 2, 3)}),
        ("worker-0@worker-1:0,2", {"worker-0": (0, 1, 2, 3), "worker-1": (0, 2)}),
        ("worker-*:0-3", {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3)}),
        ("worker-0:1@worker-0:3", {"worker-0": (1, 3)}),
        ("localhost:0,2", {"localhost": (0, 2)}),
    ],
)
def test_filters_of_the_guide_choose_what_it_says(text: str, expected: dict[str, tuple[int, ...]]) -> None:
    assert f"| `{text}` |" in GUIDE
    hosts = parse_hostfile("localhost:4\nworker-[0-1]:4", name="hosts")
    assert {host.name: host.gpus for host in select(hosts, include=text).hosts} == expected


def test_the_error_in_the_guide_is_the_one_that_is_printed() -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile("a slots=4\nb slots=4 prot=2222\n", name="hosts")
    assert f"```\n{caught.value.render()}\n```" in GUIDE
