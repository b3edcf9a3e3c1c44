"""Our own modules cannot be shadowed by the user's files, and flags reach the processes below."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dsrun.launcher.isolated_command import isolated_command


def test_the_flag_for_optimized_code_reaches_the_processes_below() -> None:
    code = "from dsrun.launcher.isolated_command import isolated_command\nprint(isolated_command('python', 'm')[:3])"
    for flags, expected in (([], ["python", "-u", "-c"]), (["-OO"], ["python", "-OO", "-u"])):
        run = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == str(expected)


def test_files_in_the_working_folder_cannot_shadow_what_dsrun_imports(tmp_path: Path) -> None:
    for name in ("queue.py", "psutil.py", "selectors.py", "dsrun.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "__init__.py").write_text("raise SystemExit('shadowed')")
    agent = subprocess.run(
        isolated_command(sys.executable, "dsrun.launcher.agent.main", "job"),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
    )
    assert (agent.returncode, agent.stdout, agent.stderr) == (0, b"", b"")
