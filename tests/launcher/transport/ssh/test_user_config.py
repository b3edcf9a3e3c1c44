"""ssh_config with what it includes, as paramiko reads it, and what is asked for there that nobody follows."""

from __future__ import annotations

from pathlib import Path

import pytest
from paramiko import SSHConfig

from dsrun.launcher.transport.ssh.user_config import not_followed, read_configs


def lookup(host: str, *paths: Path) -> dict[str, object]:
    return dict(SSHConfig.from_text(read_configs(paths)).lookup(host))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("spelling", ["Include {}", "include={}", '  Include "{}"', "Include {} # why"])
def test_an_included_file_is_read_in_its_place(tmp_path: Path, spelling: str) -> None:
    other = write(tmp_path / "other", "Host gpu-*\n  User ann\n  Port 2222\n")
    config = write(tmp_path / "config", f"{spelling.format(other)}\nPort 99\nHost *\n  User bob\n")
    assert lookup("gpu-1", config)["user"] == "ann"
    assert lookup("gpu-1", config)["port"] == "2222"
    # The include is over, so that what follows is for all hosts again.
    assert lookup("box", config)["user"] == "bob"
    assert lookup("box", config)["port"] == "99"


def test_files_are_included_by_pattern_in_order(tmp_path: Path) -> None:
    write(tmp_path / "conf.d" / "20-late", "User late\nPort 20\n")
    write(tmp_path / "conf.d" / "10-early", "User early\n")
    config = write(tmp_path / "config", f"Include {tmp_path}/none/* {tmp_path}/conf.d/*\n")
    settings = lookup("box", config)
    assert (settings["user"], settings["port"]) == ("early", "20")


def test_plain_settings_may_be_included_in_a_section(tmp_path: Path) -> None:
    other = write(tmp_path / "other", "User ann\n")
    config = write(tmp_path / "config", f"Host box\n  Include {other}\n  Port 7\n")
    assert lookup("box", config)["user"] == "ann"
    assert lookup("box", config)["port"] == "7"
    assert "user" not in lookup("fox", config)


def test_sections_within_a_section_are_told_for_its_hosts_alone(tmp_path: Path) -> None:
    other = write(tmp_path / "other", "Host *\n  User ann\n")
    config = write(tmp_path / "config", f"Host box\n  Include {other}\n")
    assert not_followed(lookup("box", config)) == [f"Include {other}"]
    assert not_followed(lookup("fox", config)) == []


def test_the_first_file_counts_and_its_last_section_ends_with_it(tmp_path: Path) -> None:
    user = write(tmp_path / "user", "Host box\n  User ann\n")
    system = write(tmp_path / "system", "User bob\nPort 7\n")
    assert lookup("box", user, tmp_path / "missing", system)["user"] == "ann"
    assert lookup("fox", user, system)["user"] == "bob"
    assert lookup("fox", user, system)["port"] == "7"


def test_files_that_include_each_other_are_an_error(tmp_path: Path) -> None:
    config = tmp_path / "config"
    write(config, f"Include {config}\n")
    with pytest.raises(OSError, match="include each other"):
        read_configs([config])


def test_what_leads_elsewhere_is_found_and_what_asks_for_nothing_is_not(tmp_path: Path) -> None:
    config = write(
        tmp_path / "config",
        "Host box\n  HostKeyAlias real\n  CertificateFile ~/c.pub\n  BindAddress 10.0.0.1\n"
        "Host *\n  AddressFamily any\n  IdentityAgent SSH_AUTH_SOCK\n  RevokedHostKeys none\n"
        "  GSSAPIAuthentication yes\n  SendEnv LANG LC_*\n  Ciphers aes256-ctr\n",
    )
    assert not_followed(lookup("fox", config)) == []
    asked = not_followed(lookup("box", config))
    assert [words.split()[0] for words in asked] == ["BindAddress", "CertificateFile", "HostKeyAlias"]
    assert asked[-1] == "HostKeyAlias real"
