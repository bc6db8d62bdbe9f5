"""A manifest is read back as it was written, or refused with what is wrong."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from pswire.checkpoint.errors import CheckpointError, DamagedError, FormatError
from pswire.checkpoint.manifest import (
    STATE,
    CheckpointName,
    FilePart,
    Manifest,
    part_name,
)
from pswire.membership import Mode
from tests.doubles.checkpoints import SCHEMA, manifest_of

DIGEST = xxh3_128_hexdigest(b"")
MANIFEST = replace(
    manifest_of([FilePart(part_name(i, 2), 100 + i, DIGEST) for i in range(2)]),
    mode=Mode.SSP,
    chunk_bytes=4096,
    state=FilePart(STATE, 300, DIGEST),
)


def sealed(body: object, format_version: int = 1) -> str:
    """A file whose digest fits, so that only what it says can be wrong."""

    def canonical(value: object) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    digest = xxh3_128_hexdigest(canonical(body).encode())
    whole = {"format": format_version, "manifest": body, "digest": digest}
    return canonical(whole) + "\n"


def body_of(manifest: Manifest) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(manifest.to_json())["manifest"]
    return body


def test_it_is_read_back_as_it_was_written() -> None:
    text = MANIFEST.to_json()

    without = replace(MANIFEST, state=None)
    assert Manifest.from_json(without.to_json()) == without
    assert Manifest.from_json(text) == MANIFEST
    assert Manifest.from_json(text.encode()) == MANIFEST
    assert sealed(body_of(MANIFEST)) == text


def test_its_placement_is_the_one_of_its_shards_and_chunks() -> None:
    placement = MANIFEST.placement()

    assert placement.shard_count == 2
    held = sum(placement.byte_count_of_shard(index) for index in range(2))
    assert held == sum(entry.byte_count for entry in SCHEMA.entries)
    assert MANIFEST.byte_count == 201


def test_no_byte_of_it_changes_unnoticed() -> None:
    data = MANIFEST.to_json().encode()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        with pytest.raises((DamagedError, FormatError)):
            Manifest.from_json(bytes(changed))


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_cut_off_one_is_damaged(length: int) -> None:
    with pytest.raises(DamagedError, match=r"^it is (empty|no JSON)|its digest"):
        Manifest.from_json(MANIFEST.to_json()[:length])


@pytest.mark.parametrize(
    "text", ["[]", "null", "7", '"a"', "{}", "[" * 100_000, "\x80\x04", "\0" * 9]
)
def test_other_files_are_damaged(text: str) -> None:
    with pytest.raises(DamagedError, match="it is no JSON of a manifest"):
        Manifest.from_json(text)


def test_a_newer_format_is_refused_by_name_whatever_it_holds() -> None:
    with pytest.raises(FormatError, match=r"format 2, and this release reads up to 1"):
        Manifest.from_json(sealed({"new": True}, format_version=2))


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    body = body_of(MANIFEST)
    change(body)
    return body


WRONG = {
    "no_name": lambda body: body.pop("name"),
    "name_up": lambda body: body.update(name="../../etc"),
    "name_nul": lambda body: body.update(name="step-000000000500\0"),
    "name_long": lambda body: body.update(name="s" * 300),
    "other_version": lambda body: body.update(version=7),
    "version_bool": lambda body: body.update(version=True),
    "version_huge": lambda body: body.update(version=2**70),
    "clock": lambda body: body.update(clock=-1),
    "created": lambda body: body.update(created_unix_s=float("nan")),
    "created_late": lambda body: body.update(created_unix_s=10**400),
    "mode": lambda body: body.update(mode="lockstep"),
    "job": lambda body: body.update(job_id=""),
    "no_shards": lambda body: body.update(shard_count=0, parts=[]),
    "many_shards": lambda body: body.update(shard_count=2**40),
    "fewer_parts": lambda body: body["parts"].pop(),
    "part_up": lambda body: body["parts"][0].__setitem__(0, "../part"),
    "part_size": lambda body: body["parts"][0].__setitem__(1, -5),
    "part_size_text": lambda body: body["parts"][0].__setitem__(1, "5"),
    "part_digest": lambda body: body["parts"][0].__setitem__(2, "abc"),
    "part_digest_none": lambda body: body["parts"][0].__setitem__(2, None),
    "part_list": lambda body: body.update(parts=[1, 2]),
    "chunk_bytes": lambda body: body.update(chunk_bytes=1),
    "finite": lambda body: body.update(is_finite=1),
    "terms": lambda body: body.update(terms={}),
    "type": lambda body: body["terms"]["schema"]["entries"][0].update(element_type=99),
    "shape": lambda body: body["terms"]["schema"]["entries"][0].update(shape=[-1]),
    "shape_text": lambda body: body["terms"]["schema"]["entries"][0].update(shape="ab"),
    "too_large": lambda body: body["terms"]["schema"]["entries"][0].update(
        shape=[2**30]
    ),
    "overflow": lambda body: body["terms"]["schema"]["entries"][0].update(
        shape=[4194305, 4194305, 211106198978564]
    ),
    "optimizer": lambda body: body["terms"]["optimizers"][0]["groups"][0].update(
        entry_indexes=[5]
    ),
    "state_up": lambda body: body["state"].__setitem__(0, "../state.safetensors"),
    "state_short": lambda body: body["state"].pop(),
    "state_digest": lambda body: body["state"].__setitem__(2, ""),
    "job_state": lambda body: body.update(job=[]),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_what_no_release_writes_is_damaged(
    change: Callable[[dict[str, Any]], object],
) -> None:
    with pytest.raises(DamagedError) as caught:
        Manifest.from_json(sealed(changed(change)))

    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_names_come_in_the_order_in_which_they_are_made() -> None:
    names = [
        CheckpointName(9),
        CheckpointName(9, 2),
        CheckpointName(9, 10),
        CheckpointName(10**12),
        CheckpointName(10**13),
    ]

    assert sorted([*names[3:], *names[:3]]) == names
    assert list(map(str, names[:3])) == [
        "step-000000000009",
        "step-000000000009-2",
        "step-000000000009-10",
    ]
    assert [CheckpointName.parse(str(name)) for name in names] == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "..",
        "../../x",
        "/step-000000000500",
        "a/../step-000000000500",
        "step-000000000500/..",
        "step-000000000500\n",
        "step-000000000500\0",
        "step-000000000500-0",
        "step-000000000500-1",
        "step-000000000500-02",
        "step-0000000000500",
        "step-" + "\N{ARABIC-INDIC DIGIT FIVE}" * 12,
        "step-500",
        "step%2D000000000500",
        "model.pt",
        "s" * 300,
    ],
)
def test_what_is_no_name_is_refused_before_it_is_part_of_a_path(text: str) -> None:
    assert CheckpointName.parse(text) is None
    with pytest.raises(CheckpointError, match="is no name of a checkpoint") as caught:
        CheckpointName.checked(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_parts_are_named_by_shard() -> None:
    assert re.fullmatch(r"part-00003-of-00010\.safetensors", part_name(3, 10))
