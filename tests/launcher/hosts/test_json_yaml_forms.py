from __future__ import annotations

import json

import pytest

from dsrun.errors import HostfileError
from dsrun.launcher.hosts.hostfile import parse_hostfile
from dsrun.launcher.hosts.json_yaml_forms import Form, find_form
from dsrun.launcher.hosts.spec import HostSpec

LIST_JSON = """[
  {"host": "ada@w[0-1]", "slots": 2, "port": 2222, "addr": "10.0.0.[4-5]", "python": "/opt/my env/python",
   "env": {"A": "two\\nlines", "B": 1, "C": 0.5}},
  {"host": "[::1]", "gpus": [0, 3], "user": "bob"}
]"""

LIST_YAML = """\
# the same in YAML
- host: ada@w[0-1]
  slots: 2
  port: 2222
  addr: 10.0.0.[4-5]
  python: /opt/my env/python
  env:
    A: "two\\nlines"
    B: 1
    C: 0.5
- host: "[::1]"
  gpus: [0, 3]
  user: bob
"""

EXPECTED = [
    ("w0", 2, 2222, "ada", "10.0.0.4", "/opt/my env/python", None, {"A": "two\nlines", "B": "1", "C": "0.5"}),
    ("w1", 2, 2222, "ada", "10.0.0.5", "/opt/my env/python", None, {"A": "two\nlines", "B": "1", "C": "0.5"}),
    ("[::1]", 2, None, "bob", None, None, (0, 3), {}),
]


def parse(text: str, name: str = "hosts") -> tuple[HostSpec, ...]:
    return parse_hostfile(text, name=name)


def problems(text: str, name: str = "hosts") -> list[str]:
    with pytest.raises(HostfileError) as caught:
        parse(text, name)
    assert all(problem.hint for problem in caught.value.problems)
    return [problem.message.split("\n")[0].removeprefix(f"{name}:") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("w0 slots=4", "lines"),
        ("w0:4", "lines"),
        ("[::1] slots=4", "lines"),
        ("[::1]:4", "lines"),
        ("[fd00::4]:4", "lines"),
        ("", "lines"),
        ("# w0: 4\nw0 slots=4", "lines"),
        ('{"w0": 4}', "json"),
        ('\n\n  [\n {"host": "w0"}]', "json"),
        ("[]", "json"),
        ("w0: 4", "yaml"),
        ("w0:\n  slots: 4", "yaml"),
        ("# c\n\n# d\n- host: w0", "yaml"),
        ("---\nw0: 4", "yaml"),
    ],
)
def test_the_form_shows_in_the_first_word(text: str, form: Form) -> None:
    assert find_form(text, name="hosts") == form


@pytest.mark.parametrize(
    ("name", "form"), [("h.json", "json"), ("h.JSON", "json"), ("a/h.yaml", "yaml"), ("h.yml", "yaml"), ("h", "lines")]
)
def test_the_ending_of_the_name_decides_first(name: str, form: Form) -> None:
    assert find_form("w0 slots=4", name=name) == form


@pytest.mark.parametrize("text", [LIST_JSON, LIST_YAML])
def test_a_list_of_objects_says_what_lines_say(text: str) -> None:
    found = [(h.name, h.slots, h.port, h.user, h.addr, h.python, h.gpus, h.env) for h in parse(text)]
    assert found == EXPECTED


def test_hosts_know_the_line_they_stand_on() -> None:
    assert [host.source for host in parse(LIST_JSON)] == ["hosts:2", "hosts:2", "hosts:4"]
    assert [host.source for host in parse(LIST_YAML)] == ["hosts:2", "hosts:2", "hosts:11"]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ('{"w0": 4, "w1": 2}', [("w0", 4), ("w1", 2)]),
        ('{"w[0-1]": "4"}', [("w0", 4), ("w1", 4)]),
        ('{"w0": {"gpus": "0,2-3"}, "[::1]": {"slots": 1}}', [("w0", 3), ("[::1]", 1)]),
        ('{"w0:4": {}}', [("w0", 4)]),
        ("w0: 4\nw1: {slots: 2}\n", [("w0", 4), ("w1", 2)]),
        ("w0: &same {slots: 4}\nw1: *same\n", [("w0", 4), ("w1", 4)]),
        ("{w0: 4}", [("w0", 4)]),
        ('// a comment\n{"w0": 4,}', [("w0", 4)]),
    ],
)
def test_an_object_maps_hosts_to_slots_or_to_more(text: str, hosts: list[tuple[str, int]]) -> None:
    name = "hosts.yaml" if text.startswith("{w0") else "hosts.json" if text.startswith("//") else "hosts"
    assert [(host.name, host.slots) for host in parse(text, name)] == hosts


def test_whatever_json_can_write_in_a_variable_arrives() -> None:
    value = "quotes \" ' back\\slash \t tab \n line ünïcode \U0001f600 $(x)"
    (host,) = parse(json.dumps([{"host": "w", "slots": 1, "env": {"V": value}}]))
    assert host.env == {"V": value}


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ('{"a;b": 4}', ["1:4: `a;b` is no host name: it has `;`"]),
        ('[{"host": "-oX", "slots": 1}]', ["1:12: `-oX` is no host name: it begins like an option"]),
        ('[{"host": "a\\nb", "slots": 1}]', ["1:11: `a?b` is no host name: it has U+000A"]),
        ('[{"host": "a\\u0000", "slots": 1}]', ["1:11: `a?` is no host name: it has U+0000"]),
        ('{"w": 0}', ["1:7: `slots` is 0; expected 1 to 4096"]),
        ('{"w": -1}', ["1:7: `slots` is `-1`; expected 1 to 4096"]),
        ('{"w": 4.0}', ["1:7: `slots` is `4.0`; expected 1 to 4096"]),
        ('{"w": 1e3}', ["1:7: slots of `w` is no plain text"]),
        ('{"w": true}', ["1:7: slots of `w` is no plain text"]),
        ('{"w": null}', ["1:2: the host has no `slots=N`"]),
        ('{"w": [1]}', ["1:7: slots of `w` is a list"]),
        ('{"w": 1, "W": 1}', ["1:11: host `W` stands on line 1 already"]),
        ('{"w": 1, "w": 1}', ["1:10: key `w` is here twice; first on line 1, column 2"]),
        ('{"w": {"slots": 1, "prot": 1}}', ["1:21: `prot` is no key of a host"]),
        ('{"w": {"slots": {}}}', ["1:17: `slots` is an object"]),
        ('{"w": {"slots": 1, "env": 3}}', ["1:27: `env` is no object"]),
        ('{"w": {"slots": 1, "env": {"A": null}}}', ["1:33: variable `A` is no plain text"]),
        ('{"w": {"slots": 1, "env": {"1": "x"}}}', ["1:29: `1` is no name of a variable"]),
        ('{"w": {"slots": 1, "env": {"A": "\\u0000"}}}', ["1:33: the value holds a character that no environment can"]),
        ('{"w": {"gpus": [0, "a"]}}', ["1:16: `a` is no number and no range"]),
        ('{"w": {"gpus": [0, null, [1]]}}', ["1:20: GPU is no plain text", "1:26: GPU is a list"]),
        ('{"w": {"gpus": []}}', ["1:16: a number is missing"]),
        ('[{"slots": 1}]', ["1:2: this object names no `host`"]),
        ('[{"host": 3}]', ["1:11: `host` is no text"]),
        ('[{"host": "w", "slots": 1}, 3]', ["1:29: an entry of the list is no object"]),
        ("[]", [" the hostfile names no host"]),
        ("{}", [" the hostfile names no host"]),
        ('{"w": 1,\n "x": oops}', ["2:7: expected a value, found `oops`"]),
        ('{"w"', ["1:5: expected `:` after key `w`, found the end of the file"]),
        ('{"w": 1}\x07', ["1:9: character U+0007 has no business in a hostfile"]),
        ("w: 4\n---\nx: 4\n", ["2:1: a second YAML document starts here; expected one"]),
        ("w: 4\n<<: {x: 1}\n", ["2:1: YAML merge keys are not read; write the keys out"]),
        ("w: !!python/object/apply:os.system [id]\n", ["1:4: YAML tag `!!python/object/apply:os.system` is not read"]),
        ("- just text\n", ["1:3: an entry of the list is no object"]),
        ("w: {slots: 1, env: {A: 010}}\n", ["1:24: variable `A` is no plain text"]),
        ("w: {slots: 1, env: {A: no}}\n", ["1:24: variable `A` is no plain text"]),
    ],
)
def test_each_mistake_has_its_place(text: str, messages: list[str]) -> None:
    found = problems(text)
    assert len(found) == len(messages)
    assert all(one.startswith(expected) for one, expected in zip(found, messages, strict=True)), found


@pytest.mark.parametrize(("name", "text"), [("h.json", "3"), ("h.json", '"w"'), ("h.yaml", "w0 slots=4")])
def test_a_lone_value_is_no_hostfile(name: str, text: str) -> None:
    assert problems(text, name) == ["1:1: a hostfile is a list or an object"]


@pytest.mark.parametrize("name", ["h.json", "h.yaml"])
@pytest.mark.parametrize("text", ["", "\n\n", "  \n"])
def test_an_empty_file_names_no_host_in_any_form(name: str, text: str) -> None:
    assert problems(text, name) == [" the hostfile names no host"]


def test_a_laughing_file_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    (message,) = problems("\n".join(lines))
    assert "more than 100,000 values" in message


@pytest.mark.parametrize("name", ["h.json", "h.yaml"])
@pytest.mark.parametrize("opening", ["[", '{"a":', "[{a: "])
def test_endless_nesting_is_refused(name: str, opening: str) -> None:
    (message,) = problems(opening * 20_000, name)
    assert message.startswith("1:")


def test_yaml_that_would_take_long_to_read_is_refused_with_a_way_out() -> None:
    (message,) = problems("".join(f"w{n}: 8\n" for n in range(40_000)))
    assert "characters of YAML; expected at most 262,144" in message
