"""The working folder comes to a node of Slurm, whose srun carries rsync's bytes as well as the survey's lines."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from dsrun.launcher.hosts.spec import HostSpec
from dsrun.launcher.survey.client import Survey
from dsrun.launcher.sync.hosts import sync_hosts
from dsrun.launcher.transport.srun import SrunTransport
from support.channels import RememberingChannels
from support.slurm import Cluster, cluster, why_no_slurm

_WHY_NOT = why_no_slurm() or (None if shutil.which("rsync") else "rsync is not installed")
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(120)]


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    with cluster(tmp_path_factory.mktemp("s")) as made:
        yield made


def test_the_working_folder_comes_to_a_node_over_the_survey_and_by_rsync(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a b").write_bytes(bytes(range(256)) * (1 << 12))
    node = HostSpec(name="n1", slots=1, source="test")
    with slurm.allocation() as environ:
        channels = RememberingChannels(SrunTransport(environ=environ | {"XDG_STATE_HOME": str(tmp_path / "state")}))
        try:
            for how, by in (("survey", None), ("rsync", channels)):
                with Survey([node], channels, python=sys.executable) as survey:
                    done = sync_hosts(
                        survey,
                        [node],
                        folder=str(tmp_path / "here"),
                        target=str(tmp_path / how),
                        rsync_by=by,
                        rsync_from_bytes=0,
                    )
                assert [(host.how, host.notes) for host in done.hosts] == [(how, ())], done.problems
                assert (tmp_path / how / "a b").read_bytes() == (tmp_path / "here" / "a b").read_bytes()
        finally:
            channels.end_all()
