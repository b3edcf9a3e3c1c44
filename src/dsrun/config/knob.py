"""What a config key means, written beside its type: the one source for messages, explain, schema and the docs.

A field of a section is `name: Annotated[Type, knob("what it does", ...)] = default`. `Section` is the base of every
section; its class variables say what holds for the section as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field


class Status(Enum):
    """What dsrun does with a key.

    `WORKS`: it does what it says. `PLANNED`: in the schema, not built; a value that asks for something is an error,
    or a note where ignoring it changes no result (`Knob.harmless`). `NO_MEANING`: nothing here for it to act on; a
    warning says why. `REMOVED`: gone upstream too; refused with the alternative.
    """

    WORKS = "works"
    PLANNED = "planned"
    NO_MEANING = "no meaning here"
    REMOVED = "removed"


class Auto(Enum):
    """What `"auto"` turns into.

    `SCRIPT`: left open for the script or the other batch values. `DEFAULT`: the default. `MODEL`: kept until the
    model's hidden size is known. `OPTIMIZER_LR`: the optimizer's learning rate. `OTHER_PRECISION`: false where the
    other 16-bit format is on, and an error where nothing decides.
    """

    SCRIPT = "left to the other batch values or the script"
    DEFAULT = "the default"
    MODEL = "computed from the model's hidden size"
    OPTIMIZER_LR = "the optimizer's learning rate"
    OTHER_PRECISION = "false where the other 16-bit format is on, else an error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Types that a `type` key may name; upper and lower case are the same.

    Attributes:
        noun: word for the thing that is chosen, e.g. `optimizer`.
        models: types this version builds, each with the model of its `params`.
        planned: types the schema knows and a later version builds, with the model of `params` where there is one.
        removed: types that are gone upstream, each with what to do instead.
    """

    noun: str
    models: Mapping[str, type[Section]]
    planned: Mapping[str, type[Section] | None] = field(default_factory=dict[str, "type[Section] | None"])
    removed: Mapping[str, str] = field(default_factory=dict[str, str])

    def find(self, name: str) -> str | None:
        """Returns the type this version builds, in its own spelling."""
        return next((known for known in self.models if known.lower() == name.lower()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Meaning of one key.

    Attributes:
        text: sentence that says what the key does.
        unit: unit of the value, e.g. `elements`, `steps`.
        effect: cost or gain of the key in memory, speed or numbers; None where nothing is said about it.
        status: level of support for the key in dsrun; None for the level of the section.
        reason: explanation of a status other than works: what is missing, or the reason that the key has no meaning.
        harmless: ignoring the value changes no result, so a planned key is a note and no error.
        idle: values that ask for nothing, besides the default.
        planned: values of a key that works which a later version takes; refused, as a planned key is.
        auto: meaning of the value `"auto"`; None where nothing can decide it.
        stages: ZeRO stages at which the key acts; empty for all.
        differs: difference between DeepSpeed's default and this one; None where there is none.
        users: numbers of the 343 surveyed configs that set the key and of the 45 repositories they come from; None
            where not counted.
        choices: types that the sibling key `type` may name, each with the model of this object; None for keys other
            than `params`.
        expects: expected value, in words for messages; None where the type alone is enough.
    """

    text: str
    unit: str | None = None
    effect: str | None = None
    status: Status | None = None
    reason: str | None = None
    harmless: bool = False
    idle: tuple[Any, ...] = ()
    planned: tuple[Any, ...] = ()
    auto: Auto | None = None
    stages: tuple[int, ...] = ()
    differs: str | None = None
    users: tuple[int, int] | None = None
    choices: Choices | None = None
    expects: str | None = None


def knob(
    text: str,
    *,
    unit: str | None = None,
    effect: str | None = None,
    status: Status | None = None,
    reason: str | None = None,
    harmless: bool = False,
    idle: tuple[Any, ...] = (),
    planned: tuple[Any, ...] = (),
    auto: Auto | None = None,
    stages: tuple[int, ...] = (),
    differs: str | None = None,
    users: tuple[int, int] | None = None,
    choices: Choices | None = None,
    expects: str | None = None,
) -> Knob:
    """Makes the metadata of a field, its meaning first. Arguments as in `Knob`."""
    return Knob(
        text=text,
        unit=unit,
        effect=effect,
        status=status,
        reason=reason,
        harmless=harmless,
        idle=idle,
        planned=planned,
        auto=auto,
        stages=stages,
        differs=differs,
        users=users,
        choices=choices,
        expects=expects,
    )


class Section(BaseModel):
    """Base of every section: frozen, strict, and silent about itself until asked."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=(), defer_build=True)

    #: Status of fields that state none.
    default_status: ClassVar[Status] = Status.WORKS
    #: Why, for fields that state no reason.
    default_reason: ClassVar[str] = ""
    #: Key that switches the section on, and the value that means off; other keys matter only while it is on.
    switch: ClassVar[tuple[str, Any] | None] = None
    #: Whether the section only tells about a run, so that a run without it has the same results.
    only_tells: ClassVar[bool] = False
    #: Keys that are gone upstream, each with what to do instead.
    removed: ClassVar[Mapping[str, str]] = {}
    #: Names the surveyed configs use for a key of this section, read as that key with a warning.
    renamed: ClassVar[Mapping[str, str]] = {}
    #: Keys old versions accepted and that never changed a result here, each with the reason; dropped with a warning.
    dropped: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def knob_of(cls, name: str) -> Knob:
        """Returns the metadata of a field.

        Args:
            name: a field of this section.
        """
        for item in cls.model_fields[name].metadata:
            if isinstance(item, Knob):
                return item
        raise AssertionError(f"{cls.__name__}.{name} has no knob")

    @classmethod
    def status_of(cls, name: str) -> Status:
        """What dsrun does with the field."""
        return cls.knob_of(name).status or cls.default_status

    @classmethod
    def why_of(cls, name: str) -> str:
        """Why the field does not work, where it does not."""
        return cls.knob_of(name).reason or cls.default_reason


_S = TypeVar("_S", bound=Section)


def unset(model: type[_S]) -> _S:
    """The default of a field that holds a section: that section with nothing set.

    Skips validation, so that pydantic compiles no validator for sections a config does not have; a test validates
    every default instead.
    """
    return Field(default_factory=model.model_construct)
