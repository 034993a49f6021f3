"""Records of ArrayRecord files, through grain: a JSON object each, or a `tf.train.Example`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from startrail_jax.errors import InputError
from trainer.data.opening import open_regular, reading

# Number of records that are read at a time.
BATCH_RECORDS = 256
# The types of TensorFlow's example.proto and feature.proto, as far as text needs them. The other
# lists of a feature are unknown fields here, and are skipped.
EXAMPLE_PROTO = """
name: "example.proto" package: "records" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "Feature"
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".records.BytesList"
          label: LABEL_OPTIONAL } }
message_type { name: "Features"
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".records.Feature"
            label: LABEL_OPTIONAL } }
  field { name: "feature" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED
          type_name: ".records.Features.FeatureEntry" } }
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".records.Features"
          label: LABEL_OPTIONAL } }
"""


def read_array_record(path: Path, columns: Collection[str]) -> Iterator[tuple[dict[str, Any], int]]:
    """The objects in an ArrayRecord file, in order, and the number of its bytes up to each.

    A record is a JSON object, or a `tf.train.Example` with one UTF-8 text for each key, as TFDS and
    MaxText write it.

    Args:
        path: the file.
        columns: keys to read of a `tf.train.Example`, whose others may be of any type.

    Raises:
        ValueError: if the file cannot be read, or a record is neither.
    """
    with reading(path), open_regular(path):  # Another program would wait at a pipe.
        size = path.stat().st_size
    from grain.sources import ArrayRecordDataSource

    source: Any = _read(path, lambda: ArrayRecordDataSource([str(path)]))
    with source:
        for start in range(0, len(source), BATCH_RECORDS):
            numbers = range(start, min(start + BATCH_RECORDS, len(source)))
            records = _read(path, lambda numbers=numbers: source.__getitems__(numbers))
            for number, record in zip(numbers, records, strict=True):
                place = f"{path}:{number + 1}"
                yield _fields(record, columns, place), size * (number + 1) // len(source)


def _read(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    # The package raises what its C++ code reports, as errors of several kinds.
    except Exception as error:
        raise InputError(
            f"{str(path)!r} must be a whole ArrayRecord file; got {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}. Write or copy it again, or leave it out."
        ) from error


def _fields(record: bytes, columns: Collection[str], place: str) -> dict[str, Any]:
    # An example begins with a tag, the byte 10, and JSON with a brace after any white space.
    if record.lstrip()[:1] == b"{":
        return _object(record, place)
    try:
        features = _example_type().FromString(record).features.feature
    except DecodeError as error:
        raise _neither(f"{error} at byte {record[:1]!r}", place) from None
    return {
        name: _text(name, list(features[name].bytes_list.value), place)
        for name in sorted(features)
        if name in columns
    }


def _object(record: bytes, place: str) -> dict[str, Any]:
    try:
        return json.loads(record)
    except (ValueError, RecursionError) as error:
        raise _neither(str(error), place) from None


def _text(name: str, values: list[bytes], place: str) -> str:
    if len(values) != 1:
        raise _neither(f"{len(values)} texts for {name!r}", place)
    try:
        return values[0].decode()
    except UnicodeDecodeError as error:
        raise _neither(f"{error} for {name!r}", place) from None


def _neither(given: str, place: str) -> InputError:
    return InputError(
        "A record must be a JSON object, or a tf.train.Example with one UTF-8 text for each key; "
        f"got {given} in {place!r}. Write the file again, or leave it out."
    )


@cache
def _example_type() -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(EXAMPLE_PROTO, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("records.Example"))
