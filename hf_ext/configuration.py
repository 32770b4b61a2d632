"""The habits that all configurations share: reading official files, clear errors, the package's own switches.

No torch in this file: a configuration can be read, checked and written without it.
"""

import os
from collections.abc import Iterator
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

# What is counted out one by one (blocks, labels) has a limit, far above what any published model has: a file with a
# slip or bad intent in it would otherwise keep the machine busy for hours. Part of a field's name -> the most.
LIMITS = {"layer": 1024, "depth": 1024, "attention_types": 1024, "head": 2**16, "num_labels": 10**6}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


class AutoMap:
    """`auto_map`: Auto class -> class, where a repository carries its own code. trl reads it of every configuration
    that is not stock, and the library writes into it in place: so it is there from the first look on, and in no file
    while it is empty."""

    def __get__(self, config: PreTrainedConfig | None, owner: type) -> dict[str, str]:
        return {} if config is None else vars(config).setdefault("auto_map", {})


@strict
class ExtConfig(PreTrainedConfig):
    """Base class of every configuration in this package.

    A subclass repeats the official fields, with the official names and defaults, and says which official type it
    reads: `from_pretrained` on an official `config.json` gives our configuration without a warning.

    Args:
        skip_padding: whether bidirectional encoders leave padding out of the computation. Exact on real tokens; pad
            positions of per-token outputs are zero. Set it to `False` to have pad positions computed as well.
        output_logits: whether language-model heads return `logits` beside the loss while training. `None` and `False`
            leave them out (they are the largest tensor of a training step); logits are always returned in eval mode
            and when there are no labels.
        loss_chunk_size: rows of logits that exist at the same time while the vocabulary loss is computed.
    """

    official_model_type: ClassVar[str] = ""  # empty for an architecture of this package's own
    # Fields of this package that say how to compute, not what: the official export leaves them out.
    runtime_fields: ClassVar[tuple[str, ...]] = ("skip_padding", "output_logits", "loss_chunk_size")

    auto_map = AutoMap()

    skip_padding: bool = True
    output_logits: bool | None = None
    loss_chunk_size: int = 512

    def __post_init__(self, **kwargs: Any) -> None:
        # An official file names its own type; keeping it as an instance attribute would hide the class's type.
        self.check_model_type(kwargs.pop("model_type", None))
        super().__post_init__(**kwargs)
        # `strict` wraps what a validator raises into its own error type; users get the plain ValueError first.
        self.validate_architecture()

    def to_dict(self) -> dict[str, Any]:
        """As the library's, without an empty `auto_map`."""
        fields = super().to_dict()
        if not fields.get("auto_map", True):
            del fields["auto_map"]
        return fields

    @classmethod
    def check_model_type(cls, found: str | None, source: str | os.PathLike | None = None) -> None:
        """Refuse a configuration of another architecture.

        Raises:
            ValueError: `found` is neither our type nor the official one that this class reads.
        """
        if found and cls.model_type and found not in (cls.model_type, cls.official_model_type):
            where = f" in {os.fspath(source)}" if source is not None else ""
            read = " and ".join(repr(name) for name in (cls.official_model_type, cls.model_type) if name)
            raise ValueError(
                f"model_type is {found!r}{where}, but {cls.__name__} reads {read}. Load this checkpoint "
                "with the classes of its own architecture, for example through AutoConfig and AutoModel."
            )

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read `config.json` and give it our model type, so that the library sees no mismatch to warn about."""
        try:
            config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        except (TypeError, RecursionError) as error:  # JSON, but no object, or one that is nested without end
            raise ValueError(f"config.json of {os.fspath(pretrained_model_name_or_path)} is no JSON object.") from error
        if not config_dict:
            # The library would go on with the defaults: a full-size model with random weights.
            raise OSError(
                f"{os.fspath(pretrained_model_name_or_path)} has no config.json; give a folder that save_pretrained "
                "wrote, or a Hub id."
            )
        if isinstance(config_dict.get(cls.base_config_key), dict):  # the file of a pair, of which this is one part
            config_dict = config_dict[cls.base_config_key]
        cls.check_model_type(config_dict.get("model_type"), pretrained_model_name_or_path)
        if cls.model_type and "model_type" in config_dict:
            config_dict["model_type"] = cls.model_type
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As the library's; whatever is wrong with a value is a `ValueError` or the library's error of validation.

        Raises:
            ValueError: a number beyond `LIMITS`, or a value that cannot be read.
        """
        refuse_beyond_limits({**config_dict, **kwargs})
        if cls._auto_class is None and "auto_map" in config_dict:
            # This class is not the file's own code; what it saves must not refer to code that does not come along.
            config_dict = {n: v for n, v in config_dict.items() if n not in ("auto_map", "custom_pipelines")}
        try:
            return super().from_dict(config_dict, **kwargs)
        except (AttributeError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"the configuration holds a value that {cls.__name__} cannot read ({type(error).__name__}: {error}); "
                "compare its config.json with an official one."
            ) from error

    def validate_architecture(self) -> None:
        """Check the fields against each other. Subclasses extend it; every message names field, value and mend."""
        if self.dtype is not None and not (
            isinstance(self.dtype, str | dict) or getattr(self.dtype, "is_floating_point", False)
        ):
            raise ValueError(
                f"dtype must be a floating-point type, such as 'float32' or 'bfloat16', got {self.dtype!r}."
            )
        quantization = getattr(self, "quantization_config", None)
        if quantization is not None and not (isinstance(quantization, dict) or hasattr(quantization, "to_dict")):
            raise ValueError(f"quantization_config must be a dictionary of settings, got {quantization!r}.")
        self.require_at_least("loss_chunk_size", 1)

    def refuse_inexpressible(self) -> None:
        """Raise ValueError if a field says something that the official architecture has no field for.

        Fields unknown to both stay: the official configuration keeps them too. Configurations with choices of their
        own extend this.
        """
        if not self.official_model_type:
            raise ValueError(
                f"model_type {self.model_type!r} is this package's own: there is no official architecture to export "
                "to. Save the model with save_pretrained; whoever loads it imports hf_ext."
            )

    def require_at_least(self, field: str, least: int) -> None:
        """Raise ValueError unless the integer field is at least `least`."""
        value = getattr(self, field)
        if value < least:
            raise ValueError(f"{field} must be at least {least}, got {value}.")

    def require_divisible(self, field: str, divisor_field: str) -> None:
        """Raise ValueError unless `field` is a multiple of `divisor_field`."""
        value, divisor = getattr(self, field), getattr(self, divisor_field)
        if value % divisor:
            raise ValueError(
                f"{field} ({value}) must be a multiple of {divisor_field} ({divisor}); nearest: "
                f"{field}={value // divisor * divisor or divisor} or {(value // divisor + 1) * divisor}."
            )

    def require_probability(self, field: str) -> None:
        """Raise ValueError unless the field is a probability in [0, 1), or None."""
        value = getattr(self, field)
        if value is not None and not 0.0 <= value < 1.0:
            raise ValueError(f"{field} is a probability and must lie in [0, 1), got {value}.")

    def require_rope_type(self) -> None:
        """Raise ValueError unless `rope_parameters` has a rope type of the library and a base that is a number."""
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        theta = (self.rope_parameters or {}).get("rope_theta", 1)
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
            raise ValueError(f"rope_theta must be a positive number, such as 10000, got {theta!r}.")
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_parameters names rope_type {rope_type!r}; known are {', '.join(ROPE_TYPES)}.")


@strict
class ExtImageConfig(ExtConfig):
    """What configurations of image models share: sizes that are one number for squares, or height and width.

    Args:
        image_size: pixels of the images that the model was built for.
        patch_size: pixels of a patch.
        num_channels: channels of an image.
    """

    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of the images, in pixels."""
        return height_and_width(self.image_size)

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Height and width of a patch, in pixels."""
        return height_and_width(self.patch_size)

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Rows and columns of whole patches in an image."""
        (height, width), (patch_height, patch_width) = self.image_shape, self.patch_shape
        return height // patch_height, width // patch_width

    def validate_architecture(self) -> None:
        super().validate_architecture()
        self.require_at_least("num_channels", 1)
        for field in ("image_size", "patch_size"):
            value = getattr(self, field)
            if not isinstance(value, int) and len(value) != 2 or min(height_and_width(value)) < 1:
                raise ValueError(f"{field} must be a number of pixels or height and width, at least 1, got {value}.")
        if 0 in self.patch_grid:
            raise ValueError(
                f"image_size ({self.image_size}) is smaller than patch_size ({self.patch_size}): an image must hold "
                "at least one patch."
            )


def refuse_beyond_limits(fields: dict[str, Any]) -> None:
    """Raise ValueError if a number in the fields, or in a configuration among them, is beyond `LIMITS`."""
    for field, value in fields.items():
        if field.endswith("_config") and isinstance(value, dict):
            refuse_beyond_limits(value)
        most = next((most for part, most in LIMITS.items() if part in field), None)
        if most is not None:
            largest = max(whole_numbers(value), default=0)
            if largest > most:
                raise ValueError(
                    f"{field} says {largest}, and {most} is the most that is taken; check the configuration."
                )


def whole_numbers(value: Any) -> Iterator[int]:
    """The whole numbers in a value, in lists inside it too."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from whole_numbers(item)


def height_and_width(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """A size as configurations give it -> height and width."""
    return (size, size) if isinstance(size, int) else tuple(size)
