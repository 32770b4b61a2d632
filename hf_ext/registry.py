"""Named choices that a configuration makes, and that users may add to: positions, norms, feed-forwards.

    @hf_ext.register_position("every-other")
    class EveryOther(NoPositions):
        ...

    ExtTransformerConfig(positions="every-other")

No torch in this file: the built-in classes are imported when a model is built, so that a configuration can be checked
without them.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

Check = Callable[[object], None]


@dataclass(frozen=True)
class Choice:
    """One entry.

    Args:
        target: the class, or "module:class".
        options: keyword arguments of the class that a configuration may set.
        check: takes the configuration and raises ValueError where the choice does not go with the rest of it.
    """

    target: type | str
    options: tuple[str, ...] = ()
    check: Check | None = None


class Registry:
    """Classes by the name that a configuration gives them.

    Args:
        field: the configuration's field that holds the name.
        given: keyword arguments that every class of this kind is called with.
        choices: the built-in ones.
    """

    def __init__(self, field: str, given: tuple[str, ...], choices: dict[str, Choice]) -> None:
        self.field, self.given, self.choices = field, given, choices

    def register(self, name: str, *, check: Check | None = None) -> Callable[[type], type]:
        """Class decorator: enter a class under a name. Its keyword-only arguments beyond those that all classes of
        this kind get are its options.

        Args:
            check: takes a configuration and raises ValueError where the class does not go with it.

        Raises:
            ValueError: the name is taken by another class.
        """

        def enter(cls: type) -> type:
            taken = self.choices.get(name)
            # The same class again, from a module or a notebook cell that is run a second time, replaces the first.
            if taken and getattr(taken.target, "__qualname__", taken.target) != cls.__qualname__:
                raise ValueError(f"{self.field}={name!r} is taken; register the class under another name.")
            arguments = inspect.signature(cls).parameters.values()
            options = tuple(p.name for p in arguments if p.kind is p.KEYWORD_ONLY and p.name not in self.given)
            self.choices[name] = Choice(cls, options, check)
            return cls

        return enter

    def __contains__(self, name: str) -> bool:
        return name in self.choices

    def __iter__(self):
        return iter(self.choices)

    def __getitem__(self, name: str) -> type:
        """The class of that name.

        Raises:
            ValueError: there is none.
        """
        target = self.choice(name).target
        if isinstance(target, str):
            module, _, class_name = target.partition(":")
            target = getattr(importlib.import_module(module, __package__), class_name)
        return target

    def choice(self, name: str) -> Choice:
        """The entry of that name.

        Raises:
            ValueError: there is none.
        """
        if name not in self.choices:
            raise ValueError(
                f"{self.field} must be one of {', '.join(self.choices)}, got {name!r}. A class of your own is "
                f"registered by a decorator (hf_ext.registry) before the configuration is read."
            )
        return self.choices[name]

    def check(self, config: object, options: dict[str, object] | None = None) -> None:
        """Raise ValueError unless the configuration's choice exists, takes these options, and goes with the rest."""
        name = getattr(config, self.field)
        choice = self.choice(name)
        unknown = set(options or ()) - set(choice.options)
        if unknown:
            known = ", ".join(choice.options) or "none"
            raise ValueError(f"{self.field}={name!r} takes the options {known}, got {', '.join(sorted(unknown))}.")
        if choice.check is not None:
            choice.check(config)


def check_rotary(config: object) -> None:
    """Coordinates are turned in pairs."""
    if config.head_dim % 2:
        raise ValueError(f"positions='rotary' turns pairs of coordinates: head_dim ({config.head_dim}) must be even.")


def check_relative(config: object) -> None:
    """Half of the buckets are for single distances, in an encoder for each side."""
    count = (config.position_options or {}).get("num_buckets", 32)
    if count < 4 or count % 4:
        raise ValueError(f"position_options: num_buckets must be a multiple of 4, got {count}.")
    longest = (config.position_options or {}).get("max_distance", 128)
    if longest <= count // 2:
        raise ValueError(
            f"position_options: max_distance ({longest}) must be larger than half of num_buckets ({count}), the "
            "distances that have a bucket of their own."
        )


SCHEMES = "hf_ext.layers.position_schemes"
POSITIONS = Registry(
    "positions",
    ("width", "num_heads", "head_dim", "max_positions", "is_causal"),
    {
        "none": Choice(f"{SCHEMES}:NoPositions"),
        "sinusoidal": Choice(f"{SCHEMES}:SinusoidalPositions"),
        "learned": Choice(f"{SCHEMES}:LearnedPositions"),
        "rotary": Choice(f"{SCHEMES}:RotaryPositions", ("theta",), check_rotary),
        "alibi": Choice(f"{SCHEMES}:AlibiPositions", ("bias_max",)),
        "relative": Choice(f"{SCHEMES}:RelativePositions", ("num_buckets", "max_distance"), check_relative),
    },
)
NORMS = Registry(
    "norm",
    ("eps",),
    {
        "layernorm": Choice("torch.nn:LayerNorm"),
        "layernorm-no-bias": Choice("hf_ext.layers.norms:LayerNormWithoutBias"),
        "rmsnorm": Choice("hf_ext.layers.norms:RMSNorm"),
    },
)
FEEDFORWARDS = Registry(
    "feedforward",
    ("width", "inner_width", "bias", "dropout"),
    {
        "relu": Choice("hf_ext.layers.feedforward:ReluFeedForward"),
        "gelu": Choice("hf_ext.layers.feedforward:GeluFeedForward"),
        "swiglu": Choice("hf_ext.layers.feedforward:SwiGLU"),
        "geglu": Choice("hf_ext.layers.feedforward:GeGLU"),
    },
)

register_position = POSITIONS.register
register_norm = NORMS.register
register_feedforward = FEEDFORWARDS.register
