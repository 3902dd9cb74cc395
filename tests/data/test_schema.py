"""What a schema promises: wrong ones are named, the prepared one is unambiguous, keys are what they say."""

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data.schema import MISSING, Column, Schema, hash_text, key_of_text
from hotrow.errors import SettingsError


def test_a_toml_schema_reads_back_as_the_json_it_is_saved_as(tmp_path):
    (tmp_path / "s.toml").write_text(
        'label = "click"\ndense = ["age"]\nuser = "uid"\n'
        '[[features]]\nname = "user"\ncolumn = "uid"\n'
        '[[features]]\nname = "recent"\nkind = "keys"\ntable = "item"\npooling = "sequence"\nmax_length = 5\n'
    )
    schema = Schema.read(tmp_path / "s.toml")
    (tmp_path / "s.json").write_text(schema.to_json())
    assert Schema.read(tmp_path / "s.json") == schema
    assert [(f.name, f.table, f.pooling) for f in schema.feature_settings()] == [
        ("user", "user", "sum"),
        ("recent", "item", "sequence"),
    ]
    assert schema.columns == ("click", "age", "uid", "recent")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('label = "y"\ndense = ["a"]\nfeatuers = []', 'Did you mean "features"?'),
        ('label = "y"', "neither a feature nor a dense column"),
        ('label = "y"\ndense = ["a", "a"]', '"a" stands twice'),
        ('label = "y"\n[[features]]\nname = "f"\nkind = "many"', "s.toml.features.0.kind"),
        ('label = "y"\n[[features]]\nname = "f"\nmax_length = 3', 'max_length needs kind = "keys"'),
        ("label = ", "not valid TOML"),
        ('dense = ["a"]', 's.toml: name the label, label = "click"'),
        ('dense = ["a"]\nlabel = "y"\nlabels = ["z"]', "s.toml: name the label"),
        ('dense = ["a"]\nlabels = ["y", {name = "z", kind = "many"}]', "s.toml.labels.1.kind"),
    ],
)
def test_a_wrong_schema_is_refused_with_its_place(tmp_path, text, said):
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(SettingsError, match=said.replace("?", r"\?").replace("(", r"\(")):
        Schema.read(tmp_path / "s.toml")
    with pytest.raises(SettingsError, match="cannot be read"):
        Schema.read(tmp_path / "none.toml")


def test_a_data_set_stores_a_column_once_and_two_different_ones_never_as_one():
    log = Schema(label="y", features=(Column(name="u", column="uid"),), user="uid", session="sid")
    prepared = log.prepared()
    assert (prepared.user, prepared.session, prepared.features[0].column) == ("u", "sid", "u")
    assert prepared.prepared() == prepared
    with pytest.raises(SettingsError, match='two different columns "user"'):
        Schema(label="y", features=(Column(name="user", column="uid"),), user="user").prepared()
    with pytest.raises(SettingsError, match='two different columns "hour"'):
        Schema(label="y", dense=("hour",), features=(Column(name="hour"),)).prepared()


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_text_of_an_int64_is_that_integer(value):
    assert key_of_text(str(value)) == value


@given(st.text(min_size=1))
def test_other_text_is_its_stated_hash_and_always_an_int64(text):
    key = key_of_text(text)
    assert -(1 << 63) <= key < 1 << 63
    if str(key) != text:
        digest = blake2b(text.encode(), digest_size=8).digest()
        assert key == int.from_bytes(digest, "little", signed=True) == hash_text(text)


@pytest.mark.parametrize("text", ["042", "+1", "-0", "1_000", "٣", "9223372036854775808", " 1"])
def test_text_that_is_not_a_usual_int64_is_hashed(text):
    assert key_of_text(text) == hash_text(text)


def test_empty_text_is_a_missing_key():
    assert key_of_text("") == MISSING


@pytest.mark.parametrize("name", ["s.json", "s.toml"])
@pytest.mark.parametrize("text", [b"a = " + b"[" * 100_000, b"[" * 100_000, b"\xff", b"\0", b"", b"[]", b"9" * 5000])
def test_a_damaged_schema_is_a_sentence_that_names_its_file(tmp_path, name, text):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(SettingsError, match=name):
        Schema.read(tmp_path / name)
