"""The option table and what is made of it."""

from pathlib import Path

import pytest

from ringtrain.options import table

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "options.md"


def test_the_document_is_current():
    assert table.markdown() in DOCUMENT.read_text(), "run `make docs`"


def test_every_default_is_allowed():
    resolved = table.resolve({}, environ={})
    assert set(resolved) == {option.name for option in table.TABLE}
    assert table.resolve(resolved, environ={}) == resolved


def test_what_beats_what():
    environ = {"RINGTRAIN_CACHE_CAPACITY": "5", "HOROVOD_CACHE_CAPACITY": "6"}
    assert table.resolve({"cache_capacity": 4}, environ)["cache_capacity"] == "4"
    assert table.resolve({}, environ)["cache_capacity"] == "5"
    del environ["RINGTRAIN_CACHE_CAPACITY"]
    assert float(table.resolve({}, environ)["cache_capacity"]) == 6


def test_horovod_counts_bytes_where_we_count_megabytes():
    environ = {"HOROVOD_FUSION_THRESHOLD": str(64 * 1024 * 1024)}
    assert float(table.resolve({}, environ)["fusion_threshold_mb"]) == 64


@pytest.mark.parametrize("text", ["1", "1e3", "0x10", "t.json"])
def test_a_path_of_horovod_is_no_number(text):
    assert table.resolve({}, {"HOROVOD_TIMELINE": text})["timeline_filename"] == text


@pytest.mark.parametrize("variable", ["RINGTRAIN_AUTOTUNE", "HOROVOD_AUTOTUNE"])
@pytest.mark.parametrize(
    ("words", "switch"),
    [(["1", "true", "True", "ON", "yes", "2", " 1"], "on"), (["0", "false", "FALSE", "off", "no", "-1"], "off")],
)
def test_there_are_many_words_for_on_and_off(variable, words, switch):
    for word in words:
        assert table.resolve({}, {variable: word})["autotune"] == switch
    assert table.resolve({"autotune": switch == "on"}, {})["autotune"] == switch
    with pytest.raises(ValueError, match=f"option autotune must be one of off on, not maybe .*{variable}"):
        table.resolve({}, {variable: "maybe"})


def test_dynamic_is_no_name_of_a_timeline_in_horovods_variable():
    assert table.resolve({}, {"HOROVOD_TIMELINE": "DYNAMIC"})["timeline_filename"] == ""
    assert table.resolve({"timeline_filename": "DYNAMIC"}, {})["timeline_filename"] == "DYNAMIC"


@pytest.mark.parametrize("option", table.TABLE, ids=lambda option: option.name)
def test_every_range_has_its_ends(option):
    if option.type == "text":
        inside, outside = ["", "anything"], []
    elif option.type == "steps":
        inside, outside = ["", "5", "0-3", "10-10"], ["foo", "3-", "4-3", "-1", "1-2-3", " 1", "1" * 30]
    elif option.type == "choice":
        inside, outside = option.choices, ["", "none of them"]
    else:
        inside, outside = [option.minimum, option.maximum], [option.minimum - 1, option.maximum * 2, "nan", "1x"]
    for value in inside:
        table.resolve({option.name: value}, environ={})
    for value in outside:
        with pytest.raises(ValueError, match=f"option {option.name} must be"):
            table.resolve({option.name: value}, environ={})
