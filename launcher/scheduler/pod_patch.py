"""A user's changes to a pod's template, merged into it as `kubectl patch` does. Pure: mappings in, mappings out.

[Note: merge] Mappings are merged, null takes a field away, and everything else replaces what was there. Lists whose
entries have a key of their own are merged entry by entry: a container by its name, a mount by its path. That is
Kubernetes' strategic merge patch, as far as pods need it; a plain JSON merge patch (RFC 7386) would replace all
containers to add one mount.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, cast

from dsrun.errors import Problem, UsageError

from .pod_resources import resource_problems

#: Field of a list, and what tells its entries apart.
_KEYS = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "imagePullSecrets", "resourceClaims"), "name"),
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}


def patched(template: Mapping[str, Any], patch: object, *, source: str, container: str) -> dict[str, Any]:
    """Returns a pod's template with a user's changes. See [Note: merge].

    Args:
        template: the pod's `metadata` and `spec`.
        patch: changes to the template, as they were read.
        source: source of the changes in `patch`, for messages.
        container: the name of dsrun's own container, which must stay.

    Raises:
        UsageError: carries what the patch has that is none, or that Kubernetes or JobSet would refuse.
    """
    problems = list(_shape_problems(patch, source))
    if problems:
        raise UsageError.of(problems)
    result = cast("dict[str, Any]", _merged(template, deepcopy(patch)))
    problems = [Problem(f"{source}: {problem.message}", problem.hint) for problem in _pod_problems(result, container)]
    if problems:
        raise UsageError.of(problems)
    return result


def _shape_problems(patch: object, source: str) -> Iterator[Problem]:
    if not isinstance(patch, dict):
        yield Problem(
            f"{source}: expected the fields of a pod's template, got {_kind(patch)}",
            "begin with `spec:`, and below it `nodeSelector:`, `tolerations:` and so on",
        )
        return
    for name, value in cast("dict[object, object]", patch).items():
        if name not in ("metadata", "spec"):
            yield Problem(f"{source}: `{name}` is no field of a pod's template", f"`spec:`, and `{name}:` below it")
        elif not isinstance(value, dict):
            yield Problem(f"{source}: `{name}` is {_kind(value)}", "expected fields below it")
        else:
            yield from _entry_problems(value, f"{source}: `{name}`")


def _entry_problems(value: object, where: str) -> Iterator[Problem]:
    """Yields the entries that no entry of the template could be told from, and values that no manifest has."""
    if isinstance(value, dict):
        for name, inner in cast("dict[object, object]", value).items():
            if not isinstance(name, str) or name.startswith("$"):
                yield Problem(f"{where} has the field {name!r}, which is not known here", "null takes a field away")
            elif name in _KEYS and inner is not None and not isinstance(inner, list):
                yield Problem(f"{where} has {_kind(inner)} as `{name}`", "expected a list")
            else:
                yield from _entry_problems(inner, f"{where}.{name}")
                for entry in cast("list[object]", inner) if name in _KEYS and isinstance(inner, list) else ():
                    if not isinstance(entry, dict) or _KEYS[name] not in entry:
                        yield Problem(
                            f"{where}: an entry of `{name}` has no `{_KEYS[name]}`", "entries are merged by it"
                        )
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            yield from _entry_problems(inner, where)
    elif value is not None and not isinstance(value, str | int | float):
        yield Problem(f"{where} has {value}, which YAML reads as {_kind(value)}", "write it in quotes")


def _merged(base: object, patch: object, field: str = "") -> object:
    if isinstance(patch, dict):
        result = dict(cast("Mapping[str, object]", base)) if isinstance(base, Mapping) else {}
        for name, value in cast("dict[str, object]", patch).items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = _merged(result.get(name), value, name)
        return result
    if isinstance(patch, list) and field in _KEYS:
        key = _KEYS[field]
        entries = {entry[key]: entry for entry in cast("list[dict[str, object]]", base or [])}
        for entry in cast("list[dict[str, object]]", patch):
            entries[entry[key]] = cast("dict[str, object]", _merged(entries.get(entry[key]), entry))
        return list(entries.values())
    return patch


def _pod_problems(template: Mapping[str, Any], container: str) -> Iterator[Problem]:
    pod = template["spec"] if isinstance(template.get("spec"), dict) else {}
    if pod.get("restartPolicy") != "Never":
        yield Problem(
            f"`restartPolicy` is {pod.get('restartPolicy')}",
            "JobSet starts all pods again (`--max-restarts N`); a pod that comes back alone meets nobody",
        )
    if container not in [entry["name"] for entry in pod.get("containers") or []]:
        yield Problem(f"the container `{container}` is gone", "its entry in `containers` may change, and must stay")
    else:
        yield from resource_problems(pod)


def _kind(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case _:
            return f"a {type(value).__name__}"
