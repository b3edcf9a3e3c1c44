"""Old shapes of a config, rewritten to today's with a warning each. Plain renames are `Section.renamed`, not here."""

from __future__ import annotations

import math

from dsrun.config.findings import Code, Report
from dsrun.config.text.tree import Node, Position

#: Keys of the old block `dynamic_loss_scale` -> those of `fp16`. `init_scale` is a scale, and becomes its power of 2.
OLD_SCALE_KEYS = {
    "init_scale": "initial_scale_power",
    "scale_window": "loss_scale_window",
    "delayed_shift": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "min_scale": "min_loss_scale",
}

#: Flags of `zero_optimization` -> the section whose `device` they became.
OLD_FLAGS = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}


def translate(root: Node, report: Report) -> None:
    """Rewrites old shapes in place.

    Args:
        root: the whole config; edited.
        report: report that receives a warning for each rewrite, and an error where old and new form stand side by side.
    """
    members = root.members
    if members is None:
        return
    _zero_as_flag(members, report)
    zero = members.get("zero_optimization")
    if zero is not None:
        _cpu_offload(zero, report)
    _dynamic_loss_scale(root, report)
    _one_precision(members, report)


def _zero_as_flag(members: dict[str, Node], report: Report) -> None:
    """`zero_optimization: true` meant stage 1."""
    node = members.get("zero_optimization")
    if node is None or not isinstance(node.value, bool):
        return
    stage = int(node.value)
    word = "true" if node.value else "false"
    report.warning(
        Code.OLD_SPELLING,
        "zero_optimization",
        f"`zero_optimization` is {word}, an old form; read as stage {stage}",
        node.at,
    )
    members["zero_optimization"] = Node({"stage": Node(stage, node.at)}, node.at, {"stage": node.at})


def _cpu_offload(zero: Node, report: Report) -> None:
    """`cpu_offload: true` became `offload_optimizer: {device: cpu}`."""
    members = zero.members
    if members is None:
        return
    for old, new in OLD_FLAGS.items():
        if old not in members:
            continue
        node, key_at = members.pop(old), zero.keys_at.pop(old)
        key = f"zero_optimization.{old}"
        if members.get(new) is not None and members[new].value is not None:
            report.error(
                Code.TWO_NAMES, key, f"`{key}` is the old form of `{new}`, and both are here; expected one", key_at
            )
            continue
        if node.value is None:
            continue
        if not isinstance(node.value, bool):
            report.error(
                Code.BAD_VALUE, key, f"`{key}` is an old form that is true or false; expected `{new}`", node.at
            )
            continue
        device = "cpu" if node.value else "none"
        report.warning(Code.OLD_SPELLING, key, f'`{key}` is an old form; read as `{new}.device` "{device}"', key_at)
        members[new] = Node({"device": Node(device, node.at)}, node.at, {"device": node.at})
        zero.keys_at[new] = key_at


def _dynamic_loss_scale(root: Node, report: Report) -> None:
    """A block `dynamic_loss_scale`, at the top or in `fp16`, has the names of DeepSpeed's scaler for keys of `fp16`."""
    members = root.members or {}
    fp16 = members.get("fp16")
    for owner, prefix in ((root, ""), (fp16, "fp16.")):
        block = None if owner is None or owner.members is None else owner.members.get("dynamic_loss_scale")
        if owner is None or owner.members is None or block is None:
            continue
        key, at = f"{prefix}dynamic_loss_scale", owner.keys_at.get("dynamic_loss_scale", block.at)
        if block.members is None or fp16 is None or fp16.members is None:
            message = f"`{key}` is an old form of `fp16`; expected a block of its keys, beside a section `fp16`"
            report.error(Code.OLD_SPELLING, key, message, at, "write `fp16.initial_scale_power` and so on")
        else:
            for name, value in block.members.items():
                _take_old_scale_key(
                    fp16, name, value, key=f"{key}.{name}", at=block.keys_at.get(name, at), report=report
                )
        del owner.members["dynamic_loss_scale"]
        owner.keys_at.pop("dynamic_loss_scale", None)


def _take_old_scale_key(fp16: Node, name: str, value: Node, *, key: str, at: Position, report: Report) -> None:
    assert fp16.members is not None, "the section is an object"
    new = OLD_SCALE_KEYS.get(name)
    if new is None:
        message = f"`{key}` is no key of the old block; expected one of {', '.join(OLD_SCALE_KEYS)}"
        report.error(Code.OLD_SPELLING, key, message, at)
    elif new in fp16.members:
        report.error(Code.TWO_NAMES, key, f"`{key}` is the old form of `fp16.{new}`, and both are here", at)
    else:
        number = value.value
        if name == "init_scale" and isinstance(number, (int, float)) and not isinstance(number, bool):
            power = math.log2(number) if number > 0 else -1.0
            if power < 0 or power != int(power):
                message = f"`{key}` is {number:g}; expected a power of 2, for it becomes `fp16.{new}`"
                report.error(Code.BAD_VALUE, key, message, value.at)
                return
            value = Node(int(power), value.at)
        report.warning(Code.OLD_SPELLING, key, f"`{key}` is an old form; read as `fp16.{new}`", at)
        fp16.members[new] = value
        fp16.keys_at[new] = at


def _one_precision(members: dict[str, Node], report: Report) -> None:
    """`"auto"` in one of `fp16.enabled` and `bf16.enabled` is false where the other is true."""
    sections = {name: section for name in ("fp16", "bf16") if (section := members.get(name)) and section.members}
    switches = {
        name: switch for name, section in sections.items() if (switch := (section.members or {}).get("enabled"))
    }
    on = [name for name, switch in switches.items() if switch.value is True]
    if len(on) != 1:
        return
    for name, switch in switches.items():
        if switch.value == "auto":
            key = f"{name}.enabled"
            report.note(Code.AUTO, key, f'`{key}` is "auto"; read as false, for `{on[0]}.enabled` is true', switch.at)
            switch.value = False
