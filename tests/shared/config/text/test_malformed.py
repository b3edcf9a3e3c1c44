"""Malformed files, and the exact words each of them gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.config.load import load
from dsrun.errors import ConfigError

#: Name of the file, its bytes, and what is said without the folder.
CASES: list[tuple[str, bytes, str]] = [
    (
        "empty.json",
        b"",
        "error: empty.json: the file is empty; expected a JSON object\n"
        'hint: the smallest config is {"train_micro_batch_size_per_gpu": 1}',
    ),
    (
        "only_comments.json",
        b"// nothing\n/* here */\n",
        "error: only_comments.json: the file is empty; expected a JSON object\n"
        'hint: the smallest config is {"train_micro_batch_size_per_gpu": 1}',
    ),
    ("empty.yaml", b"# nothing\n", "error: empty.yaml: the file is empty; expected a YAML mapping"),
    ("list.json", b"[1, 2]", "error: list.json:1:1: the config is a list; expected an object, `{ ... }`"),
    ("text.json", b'"x"', 'error: text.json:1:1: the config is "x"; expected an object, `{ ... }`'),
    (
        "comma_forgotten.json",
        b'{\n  "steps_per_print": 1 "bf16": {}\n}',
        'error: comma_forgotten.json:2:24: expected `,` or `}` after this value, found `"`\n'
        '  2 |   "steps_per_print": 1 "bf16": {}\n'
        "    |                        ^",
    ),
    (
        "colon_forgotten.json",
        b'{"steps_per_print" 1}',
        "error: colon_forgotten.json:1:20: expected `:` after key `steps_per_print`, found `1`\n"
        '  1 | {"steps_per_print" 1}\n'
        "    |                    ^",
    ),
    (
        "two_commas.json",
        b'{"steps_per_print": 1,, "bf16": {}}',
        "error: two_commas.json:1:23: expected a key or `}`, found `,`\n"
        '  1 | {"steps_per_print": 1,, "bf16": {}}\n'
        "    |                       ^",
    ),
    (
        "value_forgotten.json",
        b'{"steps_per_print": , "bf16": {}}',
        "error: value_forgotten.json:1:21: expected a value, found `,`\n"
        '  1 | {"steps_per_print": , "bf16": {}}\n'
        "    |                     ^",
    ),
    (
        "never_closed.json",
        b'{\n  "bf16": {"enabled": true\n',
        "error: never_closed.json:3:1: expected `,` or `}`, found the end of the file; "
        "the object opened on line 2, column 11\n"
        "  3 | \n"
        "    | ^",
    ),
    (
        "list_never_closed.json",
        b'{"a": [1, ',
        "error: list_never_closed.json:1:11: expected a value or `]`, found the end of the file; "
        "the list opened on line 1, column 7\n"
        '  1 | {"a": [1, \n'
        "    |           ^",
    ),
    (
        "wrong_bracket.json",
        b'{"a": [1}',
        "error: wrong_bracket.json:1:9: expected `,` or `]` after this value, found `}`\n"
        '  1 | {"a": [1}\n'
        "    |         ^",
    ),
    (
        "two_objects.json",
        b"{} {}",
        "error: two_objects.json:1:4: expected the end of the file, found `{`\n  1 | {} {}\n    |    ^",
    ),
    (
        "python.json",
        b'{"bf16": {"enabled": True}}',
        "error: python.json:1:22: expected a value, found `True`\n"
        '  1 | {"bf16": {"enabled": True}}\n'
        "    |                      ^\n"
        "hint: JSON writes `true`",
    ),
    (
        "bare_word.json",
        b'{"optimizer": {"type": AdamW}}',
        "error: bare_word.json:1:24: expected a value, found `AdamW`\n"
        '  1 | {"optimizer": {"type": AdamW}}\n'
        "    |                        ^\n"
        'hint: put text in quotes: "AdamW"',
    ),
    (
        "open_text.json",
        b'{"optimizer": {"type": "AdamW}}\n}',
        "error: open_text.json:1:24: this text is not closed on its line\n"
        '  1 | {"optimizer": {"type": "AdamW}}\n'
        "    |                        ^",
    ),
    (
        "bad_escape.json",
        b'{"a": "\\x41"}',
        "error: bad_escape.json:1:7: this text has an escape that JSON does not know\n"
        '  1 | {"a": "\\x41"}\n'
        "    |       ^",
    ),
    (
        "half_pair.json",
        b'{"a": "\\ud800"}',
        "error: half_pair.json:1:7: this text has half of a surrogate pair, which is no character\n"
        '  1 | {"a": "\\ud800"}\n'
        "    |       ^",
    ),
    (
        "open_comment.json",
        b'{"steps_per_print": 1 /* one',
        "error: open_comment.json:1:23: this comment is not closed; expected `*/`\n"
        '  1 | {"steps_per_print": 1 /* one\n'
        "    |                       ^",
    ),
    (
        "template.json",
        b'{"train_batch_size": ${BATCH}}',
        "error: template.json:1:22: expected a value, found `$`\n"
        '  1 | {"train_batch_size": ${BATCH}}\n'
        "    |                      ^\n"
        'hint: put text in quotes: "$"',
    ),
    (
        "twice.json",
        b'{\n  "bf16": {},\n  "bf16": {}\n}',
        'error: twice.json:3:3: key `bf16` is here twice; first on line 2, column 3\n  3 |   "bf16": {}\n    |   ^',
    ),
    (
        "twice.yaml",
        b"bf16: {}\nbf16: {}\n",
        "error: twice.yaml:2:1: key `bf16` is here twice; first on line 1, column 1",
    ),
    ("not_utf8.json", b'{"a": "\xff"}', "error: not_utf8.json:1:8: byte 0xff is not UTF-8"),
    (
        "utf16.json",
        '{"a": 1}'.encode("utf-16"),
        "error: utf16.json: is UTF-16 text; expected UTF-8\nhint: save the file as UTF-8",
    ),
    (
        "nan.json",
        b'{"gradient_clipping": NaN}',
        "error: nan.json:1:23: `gradient_clipping` is NaN; expected a number of at least 0",
    ),
    (
        "infinity.json",
        b'{"gradient_clipping": 1e999}',
        "error: infinity.json:1:23: `gradient_clipping` is Infinity; expected a number of at least 0\n"
        "hint: see `dsrun config explain gradient_clipping`",
    ),
    (
        "long_number.json",
        b'{"a":' + b"1" * 500 + b"}",
        "error: long_number.json:1:6: this number has 500 characters; expected at most 400\n"
        '  1 | {"a":' + "1" * 95 + "\n"
        "    |      ^",
    ),
    (
        "tab.yaml",
        b"bf16:\n\tenabled: true\n",
        "error: tab.yaml:2:1: malformed YAML: found character that cannot start any token",
    ),
    (
        "tag.yaml",
        b"bf16: !!python/object:os.system {}\n",
        "error: tag.yaml:1:7: YAML tag `!!python/object:os.system` is not read; write the plain value",
    ),
    (
        "merge.yaml",
        b"a: &a {x: 1}\nb:\n  <<: *a\n",
        "error: merge.yaml:3:3: YAML merge keys are not read; write the keys out",
    ),
    ("alias.yaml", b"a: *nowhere\n", "error: alias.yaml:1:4: YAML alias `*nowhere` has no anchor before it"),
    (
        "documents.yaml",
        b"bf16: {}\n---\nbf16: {}\n",
        "error: documents.yaml:2:1: a second YAML document starts here; expected one",
    ),
    (
        "section_is_number.json",
        b'{"zero_optimization": 3}',
        "error: section_is_number.json:1:23: `zero_optimization` is 3; expected an object",
    ),
    (
        "types.json",
        b'{"steps_per_print": "often", "bf16": {"enabled": "maybe"}, "train_batch_size": 1.5}',
        'error: types.json:1:21: `steps_per_print` is "often"; expected a whole number of at least 1\n'
        "hint: see `dsrun config explain steps_per_print`\n"
        'error: types.json:1:50: `bf16.enabled` is "maybe"; expected true or false\n'
        "hint: see `dsrun config explain bf16.enabled`\n"
        "error: types.json:1:80: `train_batch_size` is 1.5; expected a whole number of at least 1\n"
        "hint: see `dsrun config explain train_batch_size`",
    ),
    (
        "betas.json",
        b'{"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}',
        "error: betas.json:1:53: `optimizer.params.betas` is [0.9]; "
        "expected a list of two, each a number of at least 0 and below 1\n"
        "hint: see `dsrun config explain optimizer.params.betas`",
    ),
    (
        "params_outside.json",
        b'{"optimizer": {"type": "AdamW", "lr": 1e-4}}',
        "error: params_outside.json:1:33: `optimizer.lr` is not a key of `optimizer`\n"
        "hint: `lr` belongs in `optimizer.params`",
    ),
    (
        "params_of_another_type.json",
        b'{"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "eps": 1e-8}}}',
        "error: params_of_another_type.json:1:55: `optimizer.params.eps` is not a key of `optimizer.params`\n"
        "hint: with the `type` that is written, `optimizer.params` has `lr`, `betas`, `weight_decay`",
    ),
    (
        "required.json",
        b'{"scheduler": {"type": "WarmupDecayLR", "params": {}}}',
        "error: required.json:1:51: `scheduler.params.total_num_steps` is missing; "
        "expected a whole number of at least 1",
    ),
    (
        "max_grad_norm.json",
        b'{"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}',
        "error: max_grad_norm.json:1:43: `optimizer.params.max_grad_norm` is gone, from DeepSpeed as from here\n"
        "hint: write `gradient_clipping` at the top level",
    ),
    (
        "both_names.json",
        b'{"bf16": {"enabled": true}, "bfloat16": {"enabled": false}}',
        "error: both_names.json:1:29: `bfloat16` and `bf16` are names of the same key; expected one",
    ),
    (
        "old_and_new.json",
        b'{"zero_optimization": {"cpu_offload": true, "offload_optimizer": {"device": "none"}}}',
        "error: old_and_new.json:1:24: `zero_optimization.cpu_offload` is the old form of `offload_optimizer`, "
        "and both are here; expected one",
    ),
    (
        "blank_in_key.json",
        b'{"gradient_accumulation_steps ": 2}',
        "error: blank_in_key.json:1:2: `gradient_accumulation_steps ` is not a key of the config\n"
        "hint: did you mean `gradient_accumulation_steps`?",
    ),
    (
        "control.json",
        b'{"a\x1b[31m": 1, "bf16": {}}',
        "error: control.json:1:2: `a\\u001b[31m` is not a key of the config",
    ),
]


@pytest.mark.parametrize(("name", "data", "said"), CASES, ids=[name for name, _, _ in CASES])
def test_a_malformed_file_gets_exactly_these_words(
    name: str, data: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load(name)
    assert caught.value.render() == said
