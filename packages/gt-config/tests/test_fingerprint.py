"""Fingerprints: every field counts, equal inputs agree, documents are checked, stale is refused."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt_config import (
    CompileConfig,
    Fingerprint,
    Topology,
    explain_difference,
    fingerprint,
    refuse_stale,
)
from gt_config._field_types import field_hints
from gt_config.errors import (
    FieldDifference,
    FingerprintDocumentError,
    FingerprintTypeError,
    StaleFingerprintError,
)
from gt_config.graph_neutral import is_graph_neutral

TOPOLOGY = Topology(world=8, dp_shard=4, tp=2, batch_size=2, seq_len=128)
MODEL = {
    "config": {"dim": 256, "n_layers": 6, "rope_theta": 5e5},
    "parameters": {"layers.0.wq.weight": {"shape": (256, 256), "dtype": "float32"}},
    "buffers": {},
}
BATCH = {"tokens": {"shape": (2, 128), "dtype": "int64"}}
ENVIRONMENT = {"gt-config": "0.1.0", "torch": "2.15.0", "cuda": None}


def take(config=None, topology=TOPOLOGY, model=MODEL, batch=BATCH, environment=ENVIRONMENT):
    return fingerprint(config or CompileConfig(), topology, model, batch, environment)


# ---- every field counts ------------------------------------------------------------------------


def other_value(value: Any, hint: Any) -> Any:
    """A value of the same type that differs."""
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return (*value, "x")
    if value is None:
        [arm] = [arm for arm in get_args(hint) if arm is not type(None)]
        return arm(1)
    raise AssertionError(f"teach this test about {hint!r}")


def flips(instance: Any, path: str = ""):
    """(path, whether neutral, a copy with that one field changed) for every field, nested too."""
    hints = field_hints(type(instance))
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if dataclasses.is_dataclass(value):
            for inner_path, neutral, changed in flips(value, f"{path}{field.name}."):
                yield inner_path, neutral, dataclasses.replace(instance, **{field.name: changed})
        else:
            changed = dataclasses.replace(
                instance, **{field.name: other_value(value, hints[field.name])}
            )
            yield f"{path}{field.name}", is_graph_neutral(field), changed


CONFIG_FLIPS = list(flips(CompileConfig()))
TOPOLOGY_FLIPS = list(flips(TOPOLOGY))


def test_the_flips_reach_every_field_of_every_dataclass():
    assert {path for path, _, _ in CONFIG_FLIPS} >= {
        "mode",
        "inductor_compilation",
        "disable_passes",
        "full_recompute_saved_ops",
        "ep_overlap.num_chunks",
        "autoparallel_solver.memory_budget_gib",
    }
    assert len(TOPOLOGY_FLIPS) == len(dataclasses.fields(Topology))


@pytest.mark.parametrize(
    ("path", "neutral", "changed"), CONFIG_FLIPS, ids=[path for path, _, _ in CONFIG_FLIPS]
)
def test_flipping_a_configuration_field_changes_the_digest_unless_it_is_neutral(
    path, neutral, changed
):
    before, after = take(), take(changed)
    assert (before.digest == after.digest) == neutral
    named = {difference.path for difference in explain_difference(before, after)}
    # A tuple that grew differs in its length and in its new item.
    assert {name for name in named if not name.endswith("]")} == (
        set() if neutral else {f"config.{path}"}
    )


@pytest.mark.parametrize(
    ("path", "neutral", "changed"), TOPOLOGY_FLIPS, ids=[path for path, _, _ in TOPOLOGY_FLIPS]
)
def test_flipping_a_topology_field_changes_the_digest(path, neutral, changed):
    assert not neutral
    before, after = take(), take(topology=changed)
    assert before.digest != after.digest
    assert [d.path for d in explain_difference(before, after)] == [f"topology.{path}"]


@pytest.mark.parametrize("part", ["model", "batch", "environment"])
def test_model_batch_and_environment_count(part):
    changed = copy.deepcopy({"model": MODEL, "batch": BATCH, "environment": ENVIRONMENT}[part])
    changed["added"] = "1"
    before, after = take(), take(**{part: changed})
    assert before.digest != after.digest
    [length, added] = explain_difference(before, after)
    assert length.path == part
    assert added == FieldDifference(path=f'{part}["added"]', before=None, after='"1"')


def test_a_subclass_with_equal_fields_has_another_fingerprint():
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Derived(CompileConfig):
        pass

    [difference] = explain_difference(take(), take(Derived()))
    assert difference.path == "config"


# ---- equal inputs agree ------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers()
data = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@given(model=data, batch=data)
def test_equal_inputs_have_equal_digests(model, batch):
    first = take(model=model, batch=batch)
    second = take(model=copy.deepcopy(model), batch=copy.deepcopy(batch))
    assert first == second
    assert first.digest == second.digest
    assert hash(first) == hash(second)
    assert explain_difference(first, second) == ()


@given(entries=st.dictionaries(keys, data, max_size=6), randomness=st.randoms())
def test_insertion_order_of_a_mapping_is_irrelevant(entries, randomness):
    shuffled = list(entries.items())
    randomness.shuffle(shuffled)
    assert take(model=entries).digest == take(model=dict(shuffled)).digest


@given(entries=st.dictionaries(keys, data, min_size=1, max_size=6), changes=st.data())
def test_any_single_change_changes_the_digest(entries, changes):
    before = take(model=entries)
    key = changes.draw(st.sampled_from(list(entries)))
    changed = dict(entries)
    kind = changes.draw(st.sampled_from(["remove", "rename", "wrap"]))
    value = changed.pop(key)
    if kind == "rename":
        changed[changes.draw(keys.filter(lambda name: name not in entries))] = value
    elif kind == "wrap":
        changed[key] = [value]
    after = take(model=changed)
    assert before.digest != after.digest
    assert explain_difference(before, after) != ()


@given(a=scalars, b=scalars)
def test_two_scalars_share_a_digest_only_if_they_are_the_same(a, b):
    identical = type(a) is type(b) and repr(a) == repr(b)
    assert (take(model=a).digest == take(model=b).digest) == identical


def test_the_digest_does_not_depend_on_the_process():
    # Hash randomization differs between processes; a digest that used hash() would show it.
    program = (
        "from gt_config import *; print(fingerprint(CompileConfig(), "
        "Topology(world=1, batch_size=1, seq_len=1), {'b': 1, 'a': 2}, None, {'t': '1'}).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_the_digest_is_sha256_of_the_canonical_json():
    import hashlib

    tiny = Fingerprint(fields={"b": "1", "a": '"é"'})
    text = '{"fields":{"a":"\\"é\\"","b":"1"},"format":1}'
    assert tiny.digest == hashlib.sha256(text.encode()).hexdigest()


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["model", "batch", "environment"])
def test_refuses_data_without_a_canonical_form_and_names_its_path(part):
    with pytest.raises(FingerprintTypeError, match=f'^{part}."odd". is of type builtins.set'):
        take(**{part: {"odd": {1}}})


def test_plain_data_has_a_fingerprint_by_the_names_of_its_parts():
    assert dict(Fingerprint.of({"model": {"dim": 8}, "torch": "2.15.0"}).fields) == {
        "model": "mapping of 1",
        'model["dim"]': "8",
        "torch": '"2.15.0"',
    }


def test_refuses_an_empty_environment():
    with pytest.raises(ValueError, match="environment is empty: give the versions"):
        take(environment={})


def test_further_parts_count_under_their_names():
    plain = take()
    more = fingerprint(
        CompileConfig(), TOPOLOGY, MODEL, BATCH, ENVIRONMENT, {"loss": {"chunks": 8}}
    )
    assert explain_difference(plain, more) == (
        FieldDifference(path="loss", before=None, after="mapping of 1"),
        FieldDifference(path='loss["chunks"]', before=None, after="8"),
    )


def test_refuses_a_further_part_under_the_name_of_an_argument():
    with pytest.raises(ValueError, match="further names batch, model, which are arguments"):
        fingerprint(CompileConfig(), TOPOLOGY, MODEL, BATCH, ENVIRONMENT, {"model": 1, "batch": 2})


def test_fields_are_read_only():
    with pytest.raises(TypeError):
        take().fields["config.mode"] = "other"


# ---- documents ---------------------------------------------------------------------------------


def test_a_document_comes_back_equal():
    original = take()
    loaded = Fingerprint.from_json(original.to_json())
    assert loaded == original
    assert loaded.digest == original.digest


def test_survives_pickling():
    assert pickle.loads(pickle.dumps(take())) == take()


def edited(**changes):
    return json.dumps(json.loads(take().to_json()) | changes)


def test_refuses_a_document_whose_fields_were_edited():
    document = json.loads(take().to_json())
    document["fields"]["config.mode"] = '"none"'
    with pytest.raises(FingerprintDocumentError) as error:
        Fingerprint.from_json(json.dumps(document))
    actual = Fingerprint(fields=document["fields"]).digest
    assert str(error.value) == (
        f"the fingerprint claims the digest {document['digest']!r}, but its fields give "
        f"{actual!r}: the document was damaged or edited"
    )


def test_refuses_a_document_whose_digest_was_edited():
    with pytest.raises(FingerprintDocumentError, match="claims the digest '00'"):
        Fingerprint.from_json(edited(digest="00"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a fingerprint is JSON, and this is not: "),
        ("[]", "a fingerprint document has exactly the keys 'format', 'digest' and 'fields'"),
        ("{}", "a fingerprint document has exactly the keys 'format', 'digest' and 'fields'"),
        (
            edited(more=1),
            "a fingerprint document has exactly the keys 'format', 'digest' and 'fields'",
        ),
        (
            edited(format=2),
            "the fingerprint has format 2, and this gt-config reads format 1: capture again",
        ),
        (edited(fields=[]), "the fields of a fingerprint map paths to texts"),
        (edited(fields={"a": 1}), "the fields of a fingerprint map paths to texts"),
    ],
)
def test_refuses_a_malformed_document(text, message):
    with pytest.raises(FingerprintDocumentError) as error:
        Fingerprint.from_json(text)
    assert str(error.value).startswith(message)


# ---- explanation and refusal of what is stale --------------------------------------------------


def test_explains_changed_added_and_removed_fields():
    before = Fingerprint(fields={"same": "1", "changed": "1", "removed": "true"})
    after = Fingerprint(fields={"same": "1", "changed": "2", "added": '"x"'})
    differences = explain_difference(before, after)
    assert differences == (
        FieldDifference(path="added", before=None, after='"x"'),
        FieldDifference(path="changed", before="1", after="2"),
        FieldDifference(path="removed", before="true", after=None),
    )
    assert [str(difference) for difference in differences] == [
        'added: added, "x"',
        "changed: 1 became 2",
        "removed: removed, was true",
    ]


def test_refuses_what_is_stale_and_names_every_difference():
    with pytest.raises(StaleFingerprintError) as error:
        refuse_stale(
            stored=take(),
            current=take(
                CompileConfig(mode="aot_joint"), environment=ENVIRONMENT | {"torch": "2.14.1"}
            ),
        )
    assert str(error.value) == (
        "stale: 2 fields differ between what is stored and this run:\n"
        '  config.mode: "aot_fx_trace" became "aot_joint"\n'
        '  environment["torch"]: "2.15.0" became "2.14.1"'
    )


def test_says_one_field_differs_in_the_singular():
    with pytest.raises(StaleFingerprintError, match=r"^stale: 1 field differs between"):
        refuse_stale(stored=take(), current=take(CompileConfig(mode="none")))


def test_accepts_what_is_not_stale():
    config = CompileConfig(debug_graph_passes=True, on_shape_change="recapture")
    refuse_stale(stored=take(), current=take(config))
