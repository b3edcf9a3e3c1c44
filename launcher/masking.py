"""What may be shown of names, words and texts that could hold a secret. Pure; it hides, and never protects.

Used wherever dsrun itself shows or records something: plans, notes, events. What ranks write is theirs and is never
altered. A false alarm costs a reader three stars, a miss costs a user a key: names decide generously.

[Note: secret names] A name is cut into words at `_`, `-`, `.`, blanks and changes of case. PASSWORD, SECRET, CREDENTIAL
and kin count anywhere, KEY and TOKEN as whole words or where they end one (`apikey`, but neither `monkey` nor
`keyboard` nor `tokenizers`). A short plain number is a size and no key: `--num-key-value-heads 8` is shown.

[Note: secret options] A word that is hidden for nothing costs more than stars: the command cannot be run again. So
KEY, TOKEN and kin count only as an option's last word, but for numbers and ID behind it: `--key-projection linear` is
shown. An option that ends in FILE, PATH and kin says where a secret is, and one that begins with NO has no value.
dsrun's own options have none that is a secret, but for the variables of `--env`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plan.launch_plan import LaunchPlan

#: Stands for what is not shown.
MASK = "***"
#: A known secret shorter than this is not looked for in texts: it would hit words that mean something else.
MIN_KNOWN_SECRET = 8

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ANYWHERE = re.compile(r"PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|PRIVATEKEY|AUTHORIZATION")
_WHOLE_WORDS = frozenset({"KEY", "KEYS", "TOKEN", "TOKENS", "PASS", "PAT", "NONCE", "COOKIE", "BEARER"})
_ENDINGS = ("APIKEY", "APIKEYS", "ACCESSKEY", "SSHKEY", "AUTHKEY", "TOKEN")
#: Before TOKEN they speak of a vocabulary.
_VOCABULARY = frozenset({"PAD", "EOS", "BOS", "UNK", "SEP", "CLS", "STOP", "IMAGE", "VOCAB", "SPECIAL", "PER", "MASK"})
_SIZE = re.compile(r"[-+]?[0-9]{1,7}(\.[0-9]*)?([eE][-+]?[0-9]{1,2}|[kKmMgGbB])?|true|false|none|auto", re.IGNORECASE)
#: As the last word of an option: its value is a place, or a name, of a secret.
_PLACES = frozenset({"FILE", "PATH", "DIR", "FOLDER", "ENV", "VAR", "VARIABLE", "NAME"})
_OPTION = re.compile(r"-{1,2}[A-Za-z][A-Za-z0-9_.+-]*")
#: Hydra's `+key=value` adds a setting, `++key=value` sets it in any case.
_NAME = re.compile(r"\+{0,2}[A-Za-z][A-Za-z0-9_.+-]*")

#: Keys that their makers gave a shape: Hugging Face, OpenAI and Anthropic, GitHub, GitLab, Slack, AWS, Google, JWT.
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|glpat-[A-Za-z0-9_-]{16,}|xox[abeoprs]-[A-Za-z0-9-]{10,}|A(?:KI|SI)A[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)
#: `scheme://user:password@host`.
_URL_PASSWORD = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@]*):([^\s/@]+)@")
#: A bearer's token, and a field of a URL's query.
_BEARER = re.compile(r"\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_QUERY = re.compile(r"([?&])([A-Za-z0-9_.-]+)=([^&\s#'\"]+)")
#: A member of an object in JSON, which may be a word of a command line: `"api_key": "X"`.
_MEMBER = re.compile(r"""(["'])([A-Za-z0-9_.-]+)\1(\s*:\s*)(["'])((?:\\.|(?!\4).)*)\4""")


def is_secret_name(name: str) -> bool:
    """Whether a variable, option or field of this name holds a secret. See [Note: secret names]."""
    words = _words_of(name)
    return _is_password(words) or any(map(_is_key, ["", *words], words))


def _is_secret_option(option: str) -> bool:
    """Whether the value of a program's option is a secret. See [Note: secret options]."""
    words = _words_of(option)
    while len(words) > 1 and (words[-1].isdecimal() or words[-1] == "ID"):
        del words[-1]
    if not words or words[0] == "NO" or words[-1] in _PLACES:
        return False
    return _is_password(words) or _is_key("" if len(words) == 1 else words[-2], words[-1])


def _words_of(name: str) -> list[str]:
    return [word.upper() for word in _WORD.findall(name)]


def _is_password(words: Sequence[str]) -> bool:
    # Every shell has PWD and OLDPWD; with a word before it, it is somebody's password.
    return _ANYWHERE.search("".join(words)) is not None or (len(words) > 1 and words[-1] == "PWD")


def _is_key(before: str, word: str) -> bool:
    return before not in _VOCABULARY if word in _WHOLE_WORDS else word.endswith(_ENDINGS)


def masked(name: str, value: str) -> str:
    """Returns a variable's value as it may be shown: `***` where the name or the value itself speaks of a secret."""
    return _masked_value(value) if is_secret_name(name) else masked_text(value)


def masked_text(text: str) -> str:
    """Returns a text without what looks like a key: known shapes, passwords in URLs, bearer tokens, members of JSON."""
    if "://" in text:
        text = _URL_PASSWORD.sub(rf"\1:{MASK}@", text)
        text = _QUERY.sub(lambda match: f"{match[1]}{match[2]}={masked(match[2], match[3])}", text)
    if ":" in text:
        text = _MEMBER.sub(_masked_member, text)
    return _BEARER.sub(rf"\1{MASK}", _SHAPES.sub(MASK, text))


def _masked_member(match: re.Match[str]) -> str:
    quote, name, colon, mark, value = match.groups()
    return f"{quote}{name}{quote}{colon}{mark}{_masked_value(value) if is_secret_name(name) else value}{mark}"


def masked_words(words: Sequence[str], *, own_options: Collection[str] = ()) -> list[str]:
    """Returns the words of a command line as they may be shown.

    `--api-key=X`, `--api-key X`, `api_key=X` and `--env=API_KEY=X` lose X, and every word what `masked_text` takes. A
    secret that is a word of its own, without a shape or an option before it, cannot be told from any other word.

    Args:
        words: words of the command line, as they were typed.
        own_options: names of dsrun's own options, which take no secret: `--accept-new-host-keys train.py` is shown.
    """
    shown: list[str] = []
    is_secret = False
    for word in words:
        name, equals, value = word.partition("=")
        is_option = _OPTION.fullmatch(name) is not None
        if is_secret and not word.startswith("-"):
            shown.append(_masked_value(word))
        elif equals and (is_option or _NAME.fullmatch(name)):
            shown.append(f"{name}={_masked_setting(name, value, own_options)}")
        else:
            shown.append(masked_text(word))
        is_secret = is_option and not equals and name not in own_options and _is_secret_option(name)
    return shown


def _masked_setting(name: str, value: str, own_options: Collection[str]) -> str:
    """Returns what stands behind the `=` of a word as it may be shown."""
    if not name.startswith("-"):
        return masked(name, value)
    if name not in own_options and _is_secret_option(name):
        return _masked_value(value)
    variable, equals, rest = value.partition("=")
    # An option whose value is itself a setting: `--env=HF_TOKEN=X`.
    if equals and _NAME.fullmatch(variable):
        return f"{variable}={masked(variable, rest)}"
    return masked_text(value)


def _masked_value(value: str) -> str:
    """Returns the value of something that holds a secret, as it may be shown."""
    return MASK if value and not _SIZE.fullmatch(value) else masked_text(value)


def mask_plan(plan: Mapping[str, Any], masker: Masker | None = None) -> dict[str, Any]:
    """Returns a launch plan as it may be shown or recorded.

    Args:
        plan: plan as `LaunchPlan.to_json` wrote it; it is not changed.
        masker: masker that knows secrets by value, which may stand among the words of the script; None for no such
            secrets.
    """
    words = masked_words(plan["program"]["args"])
    return {
        **plan,
        "nonce": MASK,
        "env": _masked_environment(plan["env"]),
        "program": {**plan["program"], "args": words if masker is None else [masker.text(word) for word in words]},
        "nodes": [
            {**node, "host": _with_masked_env(node["host"]), "workers": [*map(_with_masked_env, node["workers"])]}
            for node in plan["nodes"]
        ],
    }


def _with_masked_env(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**value, "env": _masked_environment(value["env"])}


def _masked_environment(env: Mapping[str, str]) -> dict[str, str]:
    return {name: masked(name, value) for name, value in env.items()}


def masker_of(plan: LaunchPlan, environ: Mapping[str, str]) -> Masker:
    """Returns what knows a job's secrets by value.

    Args:
        plan: the job's.
        environ: the environment it is started in.
    """
    return Masker([environ, plan.env, *(node.host.env for node in plan.nodes), {"nonce": plan.nonce}])


class Masker:
    """Hides secrets that are known by value, on top of what `masked_text` knows by shape.

    Args:
        environments: variables whose names speak of secrets give the values; those shorter than `MIN_KNOWN_SECRET`
            and plain numbers are left alone.
    """

    def __init__(self, environments: Iterable[Mapping[str, str]] = ()) -> None:
        values = {
            value
            for environment in environments
            for name, value in environment.items()
            if len(value) >= MIN_KNOWN_SECRET and not value.isdecimal() and is_secret_name(name)
        }
        # Longest first, so that no rest is left of one that begins with another.
        longest_first = sorted(values, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if values else None

    def text(self, text: str) -> str:
        """Returns a text as it may be shown."""
        return masked_text(text if self._known is None else self._known.sub(MASK, text))

    def value(self, value: Any) -> Any:
        """Returns a plain JSON value with every text in it masked; keys are left, and decide as names do."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            items: dict[str, Any] = {str(key): item for key, item in value.items()}
            return {
                key: masked(key, self.text(item)) if isinstance(item, str) else self.value(item)
                for key, item in items.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value
