"""Runs one of OpenRLHF's own programs as it is, on the CPU: `python openrlhf_program.py train_sft --optim adam ...`."""

from __future__ import annotations

import runpy
import sys

import cuda_on_cpu
import stand_ins


def main() -> None:
    cuda_on_cpu.install()
    stand_ins.install("flash_attn.bert_padding", "flash_attn.utils.distributed", "torchdata", "pylatexenc")
    program = sys.argv.pop(1)
    runpy.run_module(f"openrlhf.cli.{program}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
