"""Ways to damage a file: blindly, as a disk does it, and knowingly, so that only who parses it sees what is wrong."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

from chaos.fuzzing import NEVER_OPENED

Random = random.Random


# -- bytes -----------------------------------------------------------------------------------------------------------


def flip_bits(data: bytes, r: Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(r.choice([1, 1, 2, 8])):
        position = r.randrange(len(flipped) * 8)
        flipped[position // 8] ^= 1 << position % 8
    return bytes(flipped)


def truncate(data: bytes, r: Random) -> bytes:
    return data[: r.choice([0, 1, 8, r.randrange(len(data)), len(data) - 1])]


def insert(data: bytes, r: Random) -> bytes:
    position = r.randrange(len(data) + 1)
    return data[:position] + r.randbytes(r.choice([1, 4, 64, 4096])) + data[position:]


def remove_block(data: bytes, r: Random) -> bytes:
    position, nbytes = r.randrange(len(data)), r.choice([1, 4, 64, 4096])
    return data[:position] + data[position + nbytes :]


def splice(data: bytes, r: Random) -> bytes:
    """A part of the file takes another part's place."""
    source, target, nbytes = r.randrange(len(data)), r.randrange(len(data)), r.choice([1, 8, 512, len(data) // 2])
    piece = data[source : source + nbytes]
    return data[:target] + piece + data[target + len(piece) :]


def zero_block(data: bytes, r: Random) -> bytes:
    """What a file system makes of a page that it has lost."""
    position, nbytes = r.randrange(len(data)), r.choice([1, 8, 512, 4096])
    nbytes = min(nbytes, len(data) - position)
    return data[:position] + bytes(nbytes) + data[position + nbytes :]


def number_in_place(data: bytes, r: Random) -> bytes:
    """A number that some field would not be expected to hold."""
    value: int = r.choice([0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1])
    size = r.choice([1, 2, 4, 8])
    position = r.randrange(max(len(data) - size, 1))
    return data[:position] + (value % (1 << 8 * size)).to_bytes(size, "little") + data[position + size :]


def nothing_of_it(data: bytes, r: Random) -> bytes:
    return r.choice([b"", b"\0", b"\0" * len(data), r.randbytes(100), b"null", b"[]", b"{}", b'""', b"0", b"\xff\xfe"])


BLIND = [flip_bits, truncate, insert, remove_block, splice, zero_block, number_in_place, nothing_of_it]


def blindly(data: bytes, r: Random) -> bytes:
    """One to three of the above."""
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        data = r.choice(BLIND)(data, r) if data else r.randbytes(10)
    return data


# -- JSON ------------------------------------------------------------------------------------------------------------


class Raw(str):
    """A piece of JSON text that no Python object stands for."""


class Pairs(list[tuple[str, Any]]):
    """An object whose keys may come twice."""


def odd_value(r: Random) -> Any:
    """Something that a field is not expected to hold."""
    depth = r.choice([10, 500, 900, 3000, 100_000])
    return r.choice(
        [
            None,
            True,
            False,
            -1,
            0,
            1,
            2**31,
            2**63 - 1,
            2**63,
            2**64,
            -(2**63) - 1,
            Raw("1" + "0" * 400),
            Raw("9" * 4300),
            Raw("9" * 5000),
            Raw("1e999"),
            Raw("-1e999"),
            Raw("NaN"),
            0.5,
            1.0,
            1e300,
            -0.0,
            "",
            "0",
            "12",
            "abc",
            "../x",
            "/etc/passwd",
            "..",
            ".",
            "a\0b",
            "a\nb",
            "a/b",
            "a\\b",
            Raw('"\\ud800"'),
            Raw('"\\udfff\\ud800"'),
            "\x1b[2J",
            "x" * 300,
            "x" * 100_000,
            "manifest.json",
            "model.safetensors",
            "٣",
            [],
            {},
            [[]],
            [1, 2],
            [1, 2, 3],
            {"a": 1},
            {"": None},
            Raw("[" * depth + "]" * depth),
            Raw('{"a":' * depth + "1" + "}" * depth),
        ]
    )


def mutate_tree(tree: Any, r: Random) -> Any:
    """One change somewhere in what `parse` gave."""
    places: list[tuple[Any, int]] = []

    def visit(node: Any) -> None:
        if isinstance(node, Pairs):
            for index, (_, value) in enumerate(node):
                places.append((node, index))
                visit(value)
        elif isinstance(node, list):
            for index, value in enumerate(node):
                places.append((node, index))
                visit(value)

    visit(tree)
    if not places or r.random() < 0.02:
        return odd_value(r)
    # The fields near the root are many fewer than the leaves.
    node, index = r.choice(places if r.random() < 0.7 else places[:12])
    if isinstance(node, Pairs):
        key, value = node[index]
        match r.randrange(8):
            case 0:
                del node[index]
            case 1:
                node.append((key, odd_value(r)))
            case 2:
                node.insert(index, (key, odd_value(r)))
            case 3:
                node[index] = (r.choice(["", "../x", key + "x", key.upper(), r.choice(node)[0]]), value)
            case 4:
                node[index] = (key, near(value, r))
            case _:
                node[index] = (key, odd_value(r))
    else:
        match r.randrange(6):
            case 0:
                del node[index]
            case 1:
                node.append(node[index])
            case 2:
                node[index] = near(node[index], r)
            case _:
                node[index] = odd_value(r)
    return tree


def near(value: Any, r: Random) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + r.choice([-1, 1, 8, -8, 64, 1000, 2**32, -(2**32)])
    if isinstance(value, float):
        return r.choice([-value, value * 1e300, value + 1])
    if isinstance(value, str) and not isinstance(value, Raw):
        return r.choice([value + "x", value[:-1], (value * 1000)[:20_000], value.swapcase()])
    return odd_value(r)


def parse(data: bytes) -> Any:
    return json.loads(data, object_pairs_hook=Pairs)


def to_text(tree: Any) -> str:
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{to_text(value)}" for key, value in tree) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(map(to_text, tree)) + "]"
    return json.dumps(tree)


def json_knowingly(data: bytes, r: Random) -> bytes:
    """Valid JSON, mostly, with odd things in it."""
    tree = parse(data)
    for _ in range(r.choice([1, 1, 1, 2, 4])):
        tree = mutate_tree(tree, r)
    return to_text(tree).encode()


# -- safetensors -----------------------------------------------------------------------------------------------------


def safetensors_knowingly(data: bytes, r: Random) -> bytes:
    """A header that says something else of the same bytes."""
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    if r.random() < 0.1:
        return r.choice([0, 1, size - 1, size + 1, size * 2, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little") + data[8:]
    header = json_knowingly(header.rstrip(), r)
    if r.random() < 0.5:
        body = r.choice([body[:-1], body + b"\0", body[: len(body) // 2], b"", body])
    return len(header).to_bytes(8, "little") + header + body


# -- torch.save ------------------------------------------------------------------------------------------------------


class _Runs:
    """Unpickled by a careless reader, it runs something."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def hostile_pickle(r: Random) -> bytes:
    """A pickle that runs code, or makes something huge."""
    import builtins
    import os
    import subprocess

    calls: list[tuple[Callable[..., Any], Any]] = [
        (os.system, ("true",)),
        (subprocess.Popen, (["true"],)),
        (builtins.exec, ("import os; os.system('true')",)),
        (builtins.eval, ("__import__('os').system('true')",)),
        (builtins.open, (NEVER_OPENED, "w")),
        (bytearray, (2**40,)),
    ]
    function, arguments = r.choice(calls)
    return pickle.dumps({"state": {}, "x": _Runs(function, *arguments)}, protocol=r.choice([2, 2, 4]))


def record(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with archive.open(info) as file:
        # Large files are written without: they have digests.
        file._expected_crc = None  # type: ignore[attr-defined]
        return file.read()


def rewrite_zip(data: bytes, change: Callable[[dict[str, bytes]], Mapping[str, bytes] | None], r: Random) -> bytes:
    """The same archive with other records, its checksums right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {info.filename: record(archive, info) for info in archive.infolist()}
    records = dict(change(records) or records)
    target = io.BytesIO()
    compression = zipfile.ZIP_DEFLATED if r.random() < 0.1 else zipfile.ZIP_STORED
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return target.getvalue()


def torch_file_knowingly(data: bytes, r: Random) -> bytes:
    """A sound archive, whose pickle or records are not what they were."""

    def change(records: dict[str, bytes]) -> dict[str, bytes]:
        names = list(records)
        pickled = next(name for name in names if name.endswith("data.pkl"))
        match r.randrange(12):
            case 0:
                records[pickled] = hostile_pickle(r)
            case 1:
                del records[r.choice(names)]
            case 2:
                name = r.choice(names)
                records[name] = blindly(records[name], r)
            case 3:
                name = r.choice(names)
                records[name.replace("data/", r.choice(["data/../", "/", "data/0/", "data/x"]))] = records.pop(name)
            case 4:
                records[pickled.replace("data.pkl", "byteorder")] = r.choice([b"big", b"little", b"middle", b""])
            case 5:
                first, second = r.choice(names), r.choice(names)
                records[first], records[second] = records[second], records[first]
            case 6:
                # A storage of another size.
                body = records[pickled]
                position = body.find(b"cpu") + r.randrange(-2, 30)
                records[pickled] = body[:position] + r.randbytes(1) + body[position + 1 :]
            case 7:
                records[pickled.replace("data.pkl", r.choice(["constants.pkl", ".format_version", "version"]))] = b"1"
            case 8:
                records[r.choice([*names, "x"])] = _BOMB
            case _:
                records[pickled] = pickle_knowingly(records[pickled], r)
        return records

    return rewrite_zip(data, change, r)


# Deflates to a thousandth.
_BOMB = bytes(4 << 20)


def pickle_knowingly(data: bytes, r: Random) -> bytes:
    """Numbers, strings and opcodes are exchanged for others."""
    position = r.randrange(len(data))
    match r.randrange(6):
        case 0:
            return blindly(data, r)
        case 1:
            found = data.find(b"J", position)  # BININT
            number = struct.pack("<i", r.choice([-1, 0, 1, 623, 624, 625, 10**6, 2**31 - 1, -(2**31)]))
            return data[: found + 1] + number + data[found + 5 :] if 0 <= found < len(data) - 5 else data[:-1]
        case 2:
            found = data.find(b"K", position)  # BININT1
            return data[: found + 1] + r.randbytes(1) + data[found + 2 :] if 0 <= found < len(data) - 2 else data[:-1]
        case 3:
            # LONG1 of 255 bytes: a huge number.
            return data[:position] + b"\x8a\xff" + r.randbytes(255) + data[position:]
        case 4:
            opcode = r.choice(
                [b".", b"0", b"2", b"(", b")", b"}", b"]", b"N", b"t", b"R", b"b", b"s", b"u", b"Q", b"e"]
            )
            return data[:position] + opcode + data[position + r.randrange(2) :]
        case _:
            # Nested deeply.
            depth = r.choice([100, 2000, 50_000])
            return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def mutate_object(obj: Any, r: Random, odd: Callable[[Random], Any]) -> Any:
    """A copy of nested dicts, lists and tuples with one thing in it exchanged."""
    if r.random() < 0.15 or not isinstance(obj, (dict, list, tuple)) or not obj:
        return odd(r)
    if isinstance(obj, dict):
        key = r.choice(list(obj))
        copy = dict(obj)
        match r.randrange(6):
            case 0:
                del copy[key]
            case 1:
                copy[r.choice(["x", "", 5, None, (1, 2)])] = copy.pop(key)
            case _:
                copy[key] = mutate_object(copy[key], r, odd)
        return copy
    items = list(obj)
    index = r.choice([0, len(items) - 1, r.randrange(len(items))])
    match r.randrange(6):
        case 0:
            del items[index]
        case 1:
            items.append(items[index])
        case _:
            items[index] = mutate_object(items[index], r, odd)
    return items if isinstance(obj, list) or r.random() < 0.1 else tuple(items)
