"""Broken checkpoints: what bad luck and bad intent make of a config.json and of a safetensors file."""

import json
import random
import struct

ODD = (
    None, True, False, -1, 0, 1, 3, 2**31, 10**9, 10**18, 10**40, -(10**12), 0.0, -0.5, 1e308, float("nan"),
    float("inf"), "", "gelu", "../../x", "\x00", "é" * 50, "9" * 400, [], [0], [-1, 3], [[]], [10**9, 10**9], {},
    {"a": {"b": []}}, {"rope_type": "yarn", "factor": -1.0}, [["global"], 10**9],
)  # fmt: skip


def mutate_config(config: dict, chance: random.Random) -> bytes:
    """A config.json with one to three faults: odd values, missing or unknown fields, or broken text."""
    content = json.loads(json.dumps(config))
    for _ in range(chance.choice((1, 1, 2, 3))):
        field = chance.choice(sorted(content))
        kind = chance.random()
        if kind < 0.1:
            del content[field]
        elif kind < 0.15:
            content[chance.choice(("rope_scaling", "quantization_config", "auto_map", "architectures", "é"))] = (
                chance.choice(ODD)
            )
        elif isinstance(content[field], dict) and content[field] and kind < 0.6:
            content[field][chance.choice(sorted(content[field]))] = chance.choice(ODD)
        elif isinstance(content[field], int) and kind < 0.4:
            content[field] = chance.choice(
                (content[field] * 2, content[field] + 1, -content[field], content[field] ** 9)
            )
        else:
            content[field] = chance.choice(ODD)
        if not content:
            break
    text = json.dumps(content).encode()
    return scramble(text, chance) if chance.random() < 0.15 else text


def scramble(text: bytes, chance: random.Random) -> bytes:
    """Bytes changed, cut off, doubled."""
    data = bytearray(text)
    for _ in range(chance.choice((1, 2, 8))):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[place:]
            case 2:
                data[place:place] = data[place : place + 40]
            case 3:
                data[place:place] = chance.choice((b"\x00", b"[" * 3000, b'"', b"9" * 500, b"\xff\xfe"))
    return bytes(data)


def mutate_safetensors(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file with a fault in its length, its header or its data."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    kind = chance.randrange(6)
    if kind == 0:
        return data[: chance.randrange(len(data))]
    if kind == 1:
        return struct.pack("<Q", chance.choice((0, 1, size - 1, size + 1, 2**32, 2**63, 2**64 - 1))) + data[8:]
    if kind == 2:
        return scramble(data, chance)
    if kind == 3:
        return data[:8] + scramble(data[8 : 8 + size], chance)[:size].ljust(size) + body
    for _ in range(chance.choice((1, 2))):
        name = chance.choice([n for n in header if n != "__metadata__"])
        tensor = header[name]
        match chance.randrange(6):
            case 0:
                tensor["dtype"] = chance.choice(("F16", "I64", "BOOL", "F8_E4M3", "X", "", None, 3))
            case 1:
                tensor["shape"] = chance.choice(
                    ([], [0], [-1], [2**62, 2**62], [1, *tensor["shape"]], "x", None, [1.5])
                )
            case 2:
                start, end = tensor["data_offsets"]
                tensor["data_offsets"] = chance.choice(
                    ([end, start], [start, 2**63], [-1, end], [start], [0, 0], [start + 1, end + 1], None)
                )
            case 3:
                header[chance.choice(("x", "", "../x", "a" * 5000, "é"))] = header.pop(name)
            case 4:
                del header[name]
            case 5:
                header["__metadata__"] = chance.choice(
                    ({"format": "tf"}, {"format": "np"}, {}, {"format": 3}, [], None)
                )
        if len(header) < 2:
            break
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body
